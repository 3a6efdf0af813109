"""Exports a trained model: a SavedModel, a frozen graph, or both.

Input `images`: [n, height, width, channels] from 0 to 255, as in the data set.
Outputs `classes`, int64 [n], and `probabilities`, float32 [n, classes]. What
classes are called is in assets.extra/classes.txt of a SavedModel, a line each.
"""

import contextlib
import os
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
    for path in filter(None, [flags.export_dir, flags.frozen]):
        check_absent(path)
    log.info('%s', found.title)
    if flags.export_dir:
        with tf.Graph().as_default():
            save(found, flags.export_dir)
    if flags.frozen:
        with tf.Graph().as_default():
            freeze(found, flags.frozen)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__)
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
    if flags.export_dir and flags.frozen:
        paths = [os.path.abspath(flags.export_dir), os.path.abspath(flags.frozen)]
        if os.path.commonpath(paths) in paths:
            raise UserError('--export_dir and --frozen must not be in one another')
    return flags


def check_absent(path):
    """Refuses a path that exists or can't be written to."""
    if os.path.lexists(path):
        raise UserError('%s exists: nothing is overwritten; name another' % path)
    try:
        utils.check_writable(path)
    except OSError as error:
        raise UserError('%s: %s' % (path, error.strerror)) from None


@contextlib.contextmanager
def written_whole(path):
    """Yields where to write; at the end of the block that is at `path`, whole."""
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.export-', dir=parent) as directory:
        unfinished = os.path.join(directory, 'unfinished')
        yield unfinished
        os.rename(unfinished, path)


def build(found, dtype):
    """Builds the network without devices, queues or dropout.

    Args:
      found: a `Trained`.
      dtype: of the images.

    Returns:
      (inputs, outputs): {name: tensor}.
    """
    images = tf.placeholder(dtype, [None] + found.image_shape, 'images')
    logits = model.infer(
        images, found.network, len(found.classes), moments=found.moments
    )
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
    with quiet_stderr(), utils.open_session(utils.CPU, found.threads) as session:
        trained.restore(session, found)
        with written_whole(directory) as unfinished:
            builder = tf.saved_model.Builder(unfinished)
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                signatures,
                clear_devices=True,
                strip_default_attrs=True,
            )
            builder.save()
            extra = os.path.join(unfinished, 'assets.extra')
            os.mkdir(extra)
            with open(os.path.join(extra, 'classes.txt'), 'wb') as file:
                file.writelines(b'%s\n' % os.fsencode(str(n)) for n in found.classes)
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
    with written_whole(path) as unfinished, open(unfinished, 'wb') as file:
        file.write(graph.SerializeToString())
    log.info('frozen graph: %s', path)


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
