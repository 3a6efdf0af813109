"""The towers that evaluate, and the score over a whole data set."""

import collections

import numpy as np

import input_pipeline
import utils
from tf1 import tf

BATCH = 250  # images per tower and run

# start: int32 scalar placeholder, the first row. losses: float32, predictions: int64,
# both [towers * batch], for the rows from `start` on (the last row repeats).
Evaluation = collections.namedtuple('Evaluation', 'start losses predictions labels')


def build(examples, devices, build_model, batch_size=BATCH, reuse=True):
    """Builds the towers that evaluate.

    Args:
      examples: `Examples` to evaluate on.
      devices: a device string per tower.
      build_model: (images, labels) -> `ModelSpec`, without dropout.
      batch_size: images per tower and run.
      reuse: whether the model's variables exist; else the first tower creates them.

    Returns:
      (evaluation, feeds): an `Evaluation`, and the dict for the initialisers' run.
    """
    with tf.name_scope('evaluation'):
        with tf.device('/cpu:0'):
            images, feed_images = input_pipeline.hold(examples.images, 'images')
            labels, feed_labels = input_pipeline.hold(examples.labels, 'labels')
            start = tf.placeholder(tf.int32, [], 'start')
        specs = []
        for tower, device in enumerate(devices):
            with tf.device('/cpu:0'):
                rows = tf.range(batch_size) + (start + tower * batch_size)
                rows = tf.minimum(rows, len(examples.labels) - 1)
                batch = tf.gather(images, rows), tf.gather(labels, rows)
            with utils.on_tower(device, reuse or tower > 0):
                specs.append(build_model(*batch))
        with tf.device('/cpu:0'):
            losses = tf.concat([spec.losses for spec in specs], axis=0)
            predictions = tf.concat([spec.predictions for spec in specs], axis=0)
    evaluation = Evaluation(start, losses, predictions, examples.labels)
    return evaluation, {**feed_images, **feed_labels}


def make_predict(session, evaluation, find_stop=lambda: None):
    """Returns a function () -> (losses, predictions) of all examples, in their order.

    Args:
      session: where the variables are.
      evaluation: an `Evaluation`.
      find_stop: () -> a `RunStopped` that ends the evaluation, or None.
    """
    labels = evaluation.labels
    read = session.make_callable(
        [evaluation.losses, evaluation.predictions], feed_list=[evaluation.start]
    )
    rows = evaluation.losses.shape.as_list()[0]

    def predict():
        parts = []
        for start in range(0, len(labels), rows):
            utils.raise_if(find_stop())
            parts.append(read(start))
        return tuple(np.concatenate(part)[: len(labels)] for part in zip(*parts))

    return predict


def make_evaluate(session, evaluation, find_stop=lambda: None):
    """Returns a function () -> (mean loss, accuracy) over all examples, floats.

    The arguments are `make_predict`'s.
    """
    predict = make_predict(session, evaluation, find_stop)

    def evaluate():
        losses, predictions = predict()
        return score(losses, predictions, evaluation.labels)

    return evaluate


def score(losses, predictions, labels):
    """Returns (mean loss, accuracy), floats.

    All losses are added up here in the examples' order, not batch by batch: the same
    score for any number of towers.
    """
    loss = losses.mean(dtype=np.float64)
    return float(loss), float((predictions == labels).mean())
