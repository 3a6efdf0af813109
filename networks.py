"""The networks that `--model` names: those of model.py, or a function of your own."""

import contextlib
import importlib
import inspect
import os
import sys
import types

from tf1 import tf
from utils import UserError


def find_network(name, built_in):
    """Returns the network that `--model name` means, a function as in model.py.

    Args:
      name: a key of `built_in`, or 'path/file.py:function' or
        'package.module:function'. That function takes (images, training, num_classes)
        and, if it has a parameter of this name, `dropout`; it returns logits.
      built_in: {name: function}.

    Raises:
      UserError: there is no such function, or it takes something else.
      Exception: what the user's code raises while it is imported.
    """
    if name in built_in:
        return built_in[name]
    place, _, attribute = name.rpartition(':')
    if name and (not attribute or (not place and _is_file(name))):
        raise UserError(
            '--model %s names no function: %s:FUNCTION' % (name, name.rstrip(':'))
        )
    if _is_file(place):
        module = _load_file(name, os.path.abspath(place))
    elif all(part.isidentifier() for part in place.split('.')):
        module = _import_module(name, place)
    else:
        known = sorted(built_in) + ['path/file.py:function', 'package.module:function']
        raise UserError(
            '--model %s: there is no such network: name one of %s'
            % (name, ', '.join(known))
        )
    function = _get_function(name, module, attribute)
    return _adapt(name, function, _takes_dropout(name, function))


# Names


def _is_file(place):
    return place.endswith('.py') or os.sep in place


def locate(name):
    """Returns `name` with the absolute path of its file, for use from elsewhere."""
    place, _, function = name.rpartition(':')
    return '%s:%s' % (os.path.abspath(place), function) if _is_file(place) else name


def shorten(name):
    """Returns `name` without its file's directory: the same wherever the file is."""
    place, _, function = name.rpartition(':')
    return '%s:%s' % (os.path.basename(place), function) if _is_file(place) else name


def find_source(name):
    """Returns the path of the file that `find_network` loaded for `name`, or None."""
    place, _, _ = name.rpartition(':')
    module = sys.modules.get(_name_module(place) if _is_file(place) else place)
    path = getattr(module, '__file__', None)
    return path and os.path.abspath(path)


# Loading


def _name_module(place):
    """Returns what no other module is called: a user's file may be a model.py.

    A dot would make it a part of a package.
    """
    return 'network ' + os.path.abspath(place).replace('.', ' ')


def _load_file(name, path):
    """Returns the module that a file makes, the same each time."""
    known_as = _name_module(path)
    if known_as in sys.modules:
        return sys.modules[known_as]
    try:
        with open(path, 'rb') as file:
            source = file.read()
    except OSError as error:
        raise UserError('--model %s: %s: %s' % (name, path, error.strerror)) from None
    _find_imports_in(os.path.dirname(path))
    module = types.ModuleType(known_as)
    module.__file__ = path
    sys.modules[known_as] = module  # as `import` does: some code looks itself up
    try:
        with _in_users_code():
            exec(compile(source, path, 'exec', dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[known_as]
        raise
    return module


def _import_module(name, module):
    _find_imports_in(os.getcwd())
    try:
        with _in_users_code():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # It, or a package it is in; what it imports itself is missing in its code.
        if error.name is None or not (module + '.').startswith(error.name + '.'):
            raise
        raise UserError(
            '--model %s: there is no module %s, neither in %s nor where Python looks'
            % (name, module, os.getcwd())
        ) from None


def _find_imports_in(directory):
    """Lets modules of a directory be imported, where no other module is so called."""
    if directory not in sys.path:
        sys.path.append(directory)


@contextlib.contextmanager
def _in_users_code():
    """What is raised inside the block is shown with the user's frames only."""
    try:
        yield
    except Exception as error:
        error.shown_traceback = _skip_ours(error.__traceback__)
        raise


def _skip_ours(frames):
    """Returns a traceback without its first frames, those of this file and `import`."""
    while frames is not None:
        names = frames.tb_frame.f_globals
        package = names.get('__name__', '').split('.')[0]
        if names is not globals() and package != 'importlib':
            break
        frames = frames.tb_next
    return frames


# Calling


def _get_function(name, module, attribute):
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    own = [
        key
        for key, value in sorted(vars(module).items())
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise UserError(
        '--model %s: %s is no function of %s, which has %s'
        % (
            name,
            attribute,
            getattr(module, '__file__', None) or module.__name__,
            ', '.join(own) or 'none',
        )
    )


def _takes_dropout(name, function):
    """Returns whether a function has a parameter `dropout`; refuses unfit ones."""
    try:
        signature = inspect.signature(function)
        more = {'dropout': None} if 'dropout' in signature.parameters else {}
        signature.bind('images', 'training', 'num_classes', **more)
    except (TypeError, ValueError) as error:
        raise UserError(
            '--model %s must take (images, training, num_classes) and may take '
            'dropout: %s' % (name, error)
        ) from None
    return bool(more)


def _adapt(name, function, takes_dropout):
    """Returns the user's function with a built-in one's arguments, its result checked.

    Raises:
      UserError: what it returns are no logits, or it has variables that copies of it
        do not share.
    """

    def network(images, training, num_classes, dropout):
        more = {'dropout': dropout} if takes_dropout else {}
        variables_before = len(tf.global_variables())
        with _in_users_code():
            logits = function(images, training, num_classes, **more)
        made = tf.global_variables()[variables_before:]
        if made and tf.get_variable_scope().reuse:
            # Each tower would train its own, and an evaluation see untrained ones.
            raise UserError(
                '--model %s makes %s anew in each copy of the network: only variables '
                'of tf.get_variable are shared' % (name, made[0].op.name)
            )
        logits = _check_logits(name, logits, images.shape.as_list()[0], num_classes)
        if training and not tf.trainable_variables():
            raise UserError(
                '--model %s has nothing to train: make its variables with '
                'tf.get_variable' % name
            )
        return logits

    return network


def _check_logits(name, logits, batch, num_classes):
    """Returns logits as float32 [batch, num_classes]; refuses what is something else.

    Args:
      name: what `--model` says.
      logits: whatever the user's function returned.
      batch: the number of images, None where the graph does not know it.
      num_classes: how many logits there must be per image.
    """
    lacking, found = 'a tensor ', type(logits).__name__
    if isinstance(logits, tf.Tensor):
        shape = logits.shape.as_list() if logits.shape.dims is not None else None
        lacking = '' if logits.dtype.is_floating else 'floats '
        if not lacking and shape in ([batch, num_classes], [None, num_classes]):
            logits.set_shape([batch, num_classes])
            return tf.cast(logits, tf.float32)
        found = '%s %s' % (logits.dtype.name, _format_shape(shape))
    raise UserError(
        '--model %s returned %s: logits must be %s%s, one per class'
        % (name, found, lacking, _format_shape([batch or 'batch', num_classes]))
    )


def _format_shape(shape):
    if shape is None:
        return 'of unknown shape'
    return '[%s]' % ', '.join('?' if size is None else str(size) for size in shape)
