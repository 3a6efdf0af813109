"""Networks (images -> logits) and `model_fn`, which adds loss and predictions.

To train another network, write a function like `cnn` below into a file of your own:
`--model path/file.py:function`. `python model.py` lists those that are here.
"""

import collections
import functools
import itertools
import sys
import zlib

import mixed_precision
import networks
from batch_norm import batch_norm
from tf1 import tf

# loss: float32 scalar, the mean over the examples. losses: float32 [batch].
# correct: float32 [batch], 1 where the prediction is right, else 0.
# predictions: int64 [batch]. logits: float32 [batch, classes].
ModelSpec = collections.namedtuple(
    'ModelSpec', 'loss losses correct predictions logits'
)


# Layers


def weight(name, shape):
    """Creates or reuses a float32 variable, Glorot-uniform, seeded by its own name.

    With `tf.set_random_seed` it starts equal in every script, for any number of
    towers, whatever else the graph holds.

    Source: Glorot and Bengio 2010, "Understanding the difficulty of training deep
    feedforward neural networks", equation 16.
    """
    full_name = '%s/%s' % (tf.get_variable_scope().name, name)
    seed = zlib.crc32(full_name.encode())
    return tf.get_variable(
        name, shape, initializer=tf.glorot_uniform_initializer(seed=seed)
    )


def bias(name, size):
    """Creates or reuses a float32 variable [size] that starts at zero."""
    return tf.get_variable(name, [size], initializer=tf.zeros_initializer())


def conv(x, filters, size, name, stride=1, has_bias=True):
    """Convolution, SAME: [batch, h, w, c] -> [batch, h / stride, w / stride, filters].

    Height and width are rounded up.
    """
    strides = [1, stride, stride, 1]
    with tf.variable_scope(name):
        kernel = weight('kernel', [size, size, x.shape.as_list()[3], filters])
        x = tf.nn.conv2d(x, kernel, strides, padding='SAME')
        if has_bias:
            x = tf.nn.bias_add(x, bias('bias', filters))
        return x


def conv_norm(x, filters, size, training, name, stride=1):
    """Convolution and batch norm, whose beta stands for the bias; see `conv`."""
    x = conv(x, filters, size, name, stride, has_bias=False)
    return batch_norm(x, training, name + '/batch_norm')


def dense(x, units, name):
    """Fully connected layer with bias: [batch, n] -> [batch, units]."""
    with tf.variable_scope(name):
        kernel = weight('kernel', [x.shape.as_list()[1], units])
        return tf.nn.bias_add(tf.matmul(x, kernel), bias('bias', units))


def max_pool(x):
    """Halves height and width, rounding up."""
    return tf.nn.max_pool(x, [1, 2, 2, 1], strides=[1, 2, 2, 1], padding='SAME')


def flatten(x):
    """[batch, h, w, c] -> [batch, h * w * c]."""
    _, height, width, channels = x.shape.as_list()
    return tf.reshape(x, [-1, height * width * channels])


def dropout_layers(rate, seed, tower, step):
    """Returns a function that applies dropout, each call with a mask of its own.

    The masks are a function of (seed, step, tower, layer): different in each tower,
    the same after a resume.

    Args:
      rate: share of the units that is dropped, in [0, 1).
      seed: in [0, 2**31).
      tower: number of the tower.
      step: int64 scalar, the global step.
    """
    layers = itertools.count(1)

    def dropout(x):
        key = tf.stack([seed + (tower << 32) + (next(layers) << 48), step])
        # XLA would draw other numbers, and a run other masks, with it than without.
        with tf.xla.experimental.jit_scope(compile_ops=False):
            kept = tf.random.stateless_uniform(tf.shape(x), key) >= rate
        return x * (tf.cast(kept, x.dtype) / (1 - rate))

    return dropout if rate else lambda x: x


# Networks: (images float32 [batch, h, w, c], training, num_classes, dropout) ->
# logits float32 [batch, num_classes]. `dropout` does nothing in evaluation. All is
# computed in the type of the images.


# `cnn` halves images of this many pixels or more: 4 x 4 are left of small ones.
SMALLEST_POOLED = 7


def cnn(images, training, num_classes, dropout):
    """Three convolutions and two dense layers; 99.4 % on MNIST in 10 epochs."""
    del training
    x = images  # [batch, 28, 28, 1] with MNIST
    for layer, filters in enumerate([16, 32, 64], start=1):
        x = conv(x, filters, 3, 'conv%d' % layer)
        if min(x.shape.as_list()[1:3]) >= SMALLEST_POOLED:
            x = max_pool(x)  # before relu: the same, and a quarter of the work for it
        x = tf.nn.relu(x)
    x = flatten(x)  # [batch, 4 * 4 * 64]
    x = tf.nn.relu(dense(dropout(x), 128, 'dense1'))
    return dense(dropout(x), num_classes, 'dense2')


def article(images, training, num_classes, dropout):
    """Four small convolutions with batch norm, two dense layers."""
    del dropout
    x = images  # [batch, 28, 28, 1] with MNIST
    for layer, filters in enumerate([4, 8, 8, 8], start=1):
        x = tf.nn.relu(conv_norm(x, filters, 3, training, 'conv%d' % layer))
        if layer != 3:
            x = max_pool(x)
    x = flatten(x)  # [batch, 4 * 4 * 8]
    x = tf.nn.relu(dense(x, 64, 'dense1'))
    return dense(x, num_classes, 'dense2')


def lenet5(images, training, num_classes, dropout):
    """LeNet-5 as TensorFlow's MNIST tutorial widened it: 5 x 5 convolutions.

    Source: LeCun et al. 1998, "Gradient-Based Learning Applied to Document
    Recognition", figure 2, for the order of the layers.
    """
    del training
    x = images  # [batch, 28, 28, 1] with MNIST
    for layer, filters in enumerate([32, 64], start=1):
        x = max_pool(tf.nn.relu(conv(x, filters, 5, 'conv%d' % layer)))
    x = flatten(x)  # [batch, 7 * 7 * 64]
    x = tf.nn.relu(dense(x, 512, 'dense1'))
    return dense(dropout(x), num_classes, 'dense2')


def mlp(images, training, num_classes, dropout):
    """Two dense layers of 256 units, no convolution."""
    del training
    x = flatten(images)
    for layer in (1, 2):
        x = dropout(tf.nn.relu(dense(x, 256, 'dense%d' % layer)))
    return dense(x, num_classes, 'dense3')


def resnet20(images, training, num_classes, dropout):
    """The residual network of 20 layers for CIFAR.

    Source: He et al. 2015, "Deep Residual Learning for Image Recognition", section 4.2
    with n = 3, identity shortcuts (option A).
    """
    del dropout
    x = tf.nn.relu(conv_norm(images, 16, 3, training, 'conv'))
    for stage, filters in enumerate([16, 32, 64], start=1):
        for block in (1, 2, 3):
            stride = 2 if stage > 1 and block == 1 else 1
            with tf.variable_scope('stage%d_block%d' % (stage, block)):
                x = basic_block(x, filters, stride, training)
    x = tf.reduce_mean(x, axis=[1, 2])  # [batch, 64]
    return dense(x, num_classes, 'dense')


def basic_block(x, filters, stride, training):
    """[batch, h, w, c] -> [batch, h / stride, w / stride, filters], rounded up."""
    shortcut = x[:, ::stride, ::stride] if stride > 1 else x
    more = filters - x.shape.as_list()[3]
    if more:
        # Half of the zeros on each side.
        channels = [more // 2, more - more // 2]
        shortcut = tf.pad(shortcut, [[0, 0], [0, 0], [0, 0], channels])
    x = tf.nn.relu(conv_norm(x, filters, 3, training, 'conv1', stride))
    return tf.nn.relu(conv_norm(x, filters, 3, training, 'conv2') + shortcut)


NETWORKS = {f.__name__: f for f in (article, cnn, lenet5, mlp, resnet20)}


def scale(images, moments=None):
    """Scales brightness for a network: bytes to [-1, 1], or by the training set's.

    Args:
      images: [batch, height, width, channels], uint8 or floats from 0 to 255.
      moments: (mean, deviation), each [channels], of the training images: what two
        variables start with, so a checkpoint holds them. None: without.

    Returns:
      float32 [batch, height, width, channels].
    """
    x = tf.cast(images, tf.float32)
    if moments is None:
        return x / 127.5 - 1
    with tf.variable_scope('standardize'):
        mean, deviation = (
            tf.get_variable(
                name,
                values.shape,
                initializer=tf.constant_initializer(values),
                trainable=False,
            )
            for name, values in zip(('mean', 'deviation'), moments)
        )
    return (x - mean) / deviation


def infer(
    images,
    network,
    num_classes,
    training=False,
    dropout=None,
    moments=None,
    dtype=tf.float32,
):
    """Builds the network on images as they come from a data set.

    Args:
      images: [batch, height, width, channels], uint8 or floats from 0 to 255.
      network: a function like those in `NETWORKS`.
      num_classes: how many logits.
      training: whether this copy trains.
      dropout: what `dropout_layers` returns, for training.
      moments: as in `scale`.
      dtype: what the network computes in, float32 or float16; its variables are
        float32.

    Returns:
      logits, float32 [batch, num_classes].
    """
    x = tf.cast(scale(images, moments), dtype)
    with mixed_precision.variables_as(dtype):
        logits = network(x, training, num_classes, dropout or (lambda x: x))
    return tf.cast(logits, tf.float32) if dtype == tf.float16 else logits


def cross_entropies(logits, labels, label_smoothing=0):
    """Returns the loss of each example, float32 [batch].

    Args:
      logits: float32 [batch, classes].
      labels: int64 [batch].
      label_smoothing: a float in [0, 1): with S the loss is 1 - S times the cross
        entropy and S times the mean over the classes of -log(probability).

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer
    Vision", section 7, with a uniform distribution.
    """
    if not label_smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=logits
        )
    num_classes = logits.shape.as_list()[1]
    wanted = tf.one_hot(labels, num_classes, dtype=logits.dtype)
    wanted = (1 - label_smoothing) * wanted + label_smoothing / num_classes
    return tf.nn.softmax_cross_entropy_with_logits_v2(labels=wanted, logits=logits)


def model_fn(
    images,
    labels,
    network,
    num_classes,
    training=False,
    dropout=None,
    moments=None,
    dtype=tf.float32,
    label_smoothing=0,
):
    """Builds one copy of the model.

    Args:
      images: uint8 [batch, height, width, channels].
      labels: int64 [batch], in [0, num_classes).
      network, num_classes, training, dropout, moments, dtype: as in `infer`.
      label_smoothing: in training, the share of each label that all classes get alike.

    Returns:
      A `ModelSpec`.
    """
    logits = infer(images, network, num_classes, training, dropout, moments, dtype)
    losses = cross_entropies(logits, labels, label_smoothing if training else 0)
    predictions = tf.argmax(logits, axis=1)
    return ModelSpec(
        loss=tf.reduce_mean(losses),
        losses=losses,
        correct=tf.cast(tf.equal(predictions, labels), tf.float32),
        predictions=predictions,
        logits=logits,
    )


def make_model_fn(flags, data):
    """Returns the `model_fn` of a run: it takes all but what the run decides.

    Args:
      flags: what `command_line.parse` returned.
      data: the `DataSet` to train on.
    """
    return functools.partial(
        model_fn,
        network=networks.find_network(flags.model, NETWORKS),
        num_classes=len(data.classes),
        moments=data.moments,
        label_smoothing=flags.label_smoothing,
    )


if __name__ == '__main__':
    import model_description

    sys.exit(model_description.utils.run_main(model_description.main, must_show=True))
