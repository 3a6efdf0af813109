"""Exports a trained model for use elsewhere: a SavedModel, a frozen graph, or both.

Input `images`: [n, height, width, channels] from 0 to 255, as in the data set.
Outputs `classes`, int64 [n], and `probabilities`, float32 [n, classes].
"""

import os
import shutil
import sys
import tempfile

import command_line
import model
import trained
import utils
from tf1 import quiet_stderr, tf
from utils import UserError, log


def main():
    flags = parse()
    found = trained.find(flags)
    paths = [path for path in (flags.export_dir, flags.frozen) if path]
    for path in paths:
        if os.path.lexists(path):
            raise UserError('%s exists: nothing is overwritten; name another' % path)
    for path in paths:
        make_parent(path)
    log.info('%s', found.title)
    if flags.export_dir:
        with tf.Graph().as_default():
            save(found, flags.export_dir)
    if flags.frozen:
        with tf.Graph().as_default():
            freeze(found, flags.frozen)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__, allow_abbrev=False)
    trained.add_flags(parser)
    parser.add_argument(
        '--export_dir', metavar='DIR', help='a new directory for the SavedModel'
    )
    parser.add_argument(
        '--frozen',
        metavar='FILE',
        help='a new file for the graph with the weights in it, a binary GraphDef',
    )
    flags = parser.parse_args(argv)
    if not flags.export_dir and not flags.frozen:
        raise UserError('name --export_dir DIR or --frozen FILE (see --help)')
    return flags


def make_parent(path):
    """Makes the directory that a path is to be in; refuses one that takes no file."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.exists(parent) and not os.path.isdir(parent):
        raise UserError('%s: %s is not a directory' % (path, parent))
    try:
        os.makedirs(parent, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        raise UserError('%s: %s' % (path, error.strerror)) from None


def build(found, dtype):
    """Builds the network without devices, queues or dropout.

    Args:
      found: a `Trained`.
      dtype: of the images.

    Returns:
      (inputs, outputs): {name: tensor}.
    """
    images = tf.placeholder(dtype, [None] + found.image_shape, 'images')
    logits = model.infer(images, found.network, found.num_classes)
    classes = tf.argmax(logits, axis=1, name='classes')
    probabilities = tf.nn.softmax(logits, name='probabilities')
    return {'images': images}, {'classes': classes, 'probabilities': probabilities}


def save(found, directory):
    """Writes a SavedModel; `directory` is there at once and whole, or not at all.

    `serving_default` takes floats, and so whatever a client makes floats of;
    `serving_uint8` takes bytes. TensorFlow checks the type where it knows it.
    """
    signatures = {}
    for name, dtype in (('serving_default', tf.float32), ('serving_uint8', tf.uint8)):
        with tf.variable_scope('', reuse=bool(signatures)), tf.name_scope(name):
            inputs, outputs = build(found, dtype)
        signatures[name] = tf.saved_model.predict_signature_def(inputs, outputs)
    parent, base = os.path.split(os.path.abspath(directory))
    unfinished = tempfile.mkdtemp(prefix='.%s-' % base, dir=parent)
    try:
        with quiet_stderr(), utils.open_session(utils.CPU, found.threads) as session:
            trained.restore(session, found)
            builder = tf.saved_model.Builder(os.path.join(unfinished, base))
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                signatures,
                clear_devices=True,
                strip_default_attrs=True,
            )
            builder.save()
        os.rename(os.path.join(unfinished, base), directory)
    finally:
        shutil.rmtree(unfinished)
    log.info('SavedModel: %s', directory)


def freeze(found, path):
    """Writes the graph from `images` to `classes` and `probabilities` as one file."""
    _, outputs = build(found, tf.float32)
    with utils.open_session(utils.CPU, found.threads) as session:
        trained.restore(session, found)
        graph = tf.get_default_graph().as_graph_def()
        with quiet_stderr():
            graph = tf.graph_util.convert_variables_to_constants(
                session, graph, sorted(outputs)
            )
    for node in graph.node:
        node.device = ''
    with open(path + '.new', 'wb') as file:
        file.write(graph.SerializeToString())
    os.rename(path + '.new', path)
    log.info('frozen graph: %s', path)


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
