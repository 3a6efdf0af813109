"""Lists the networks that `--model` names: what each is, and how large."""

import command_line
import model
import utils
from tf1 import tf

# What the list assumes.
NUM_CLASSES = 10
MNIST_SHAPE = (28, 28, 1)
IMAGE_SHAPES = {'resnet20': (32, 32, 3)}


def main():
    parse()
    for line in format_table(describe(model.NETWORKS)):
        utils.log.info('%s', line)
    utils.log.info('with %d classes; images may be of any size', NUM_CLASSES)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__, prog='model.py')
    return parser.parse_args(argv)


def describe(built_in):
    """Yields the rows of the list, the first of them its titles."""
    yield 'network', 'parameters', 'multiply-adds', 'images', 'what it is'
    for name, network in sorted(built_in.items()):
        shape = IMAGE_SHAPES.get(name, MNIST_SHAPE)
        sizes = ['{:,}'.format(size) for size in measure(network, shape, NUM_CLASSES)]
        what = network.__doc__.splitlines()[0].rstrip('.')
        yield (name, *sizes, 'x'.join(map(str, shape)), what)


def measure(network, image_shape, num_classes):
    """Returns (parameters that are trained, multiply-adds for one image).

    Only those of convolutions and matrix products are counted: all others are few.

    Args:
      network: a function as in model.py.
      image_shape: [height, width, channels].
      num_classes: how many logits.
    """
    with tf.Graph().as_default() as graph:
        network(tf.zeros((1,) + image_shape), False, num_classes, lambda x: x)
        parameters = sum(v.shape.num_elements() for v in tf.trainable_variables())
        return parameters, sum(map(count_multiply_adds, graph.get_operations()))


def count_multiply_adds(op):
    """Returns how many an op makes: for each number that comes out, a sum of products.

    Nothing is transposed, where nothing is trained.
    """
    if op.type not in ('Conv2D', 'MatMul'):
        return 0
    weights = op.inputs[1].shape  # [h, w, c, filters] or [n, units]
    return op.outputs[0].shape.num_elements() * weights[:-1].num_elements()


def format_table(rows):
    """Yields a line for each row, its cells in columns, numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:])]
        yield '  '.join([name.ljust(widths[0]), *cells, last])
