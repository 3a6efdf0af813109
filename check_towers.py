"""`--check`: do N towers make the update of one, on this machine, with this model?

Both compute the gradients of the same weights for the same images, once: N towers of
batch B, and one tower of N * B. Plain SGD's update is these times the learning rate.
The images are noise: where real ones are all black, equal numbers go through the
network, and which of them a pooling takes for the largest, a rounding error decides.
"""

import numpy as np

import batch_norm
import updates
import utils
from tf1 import tf
from utils import RunFailed, log

# Of a variable's largest change; float32 rounds to about 1e-7.
LARGEST_DIFFERENCE = 1e-4
# A change that is less than this share of the largest of any variable is measured
# against that: of one that should be zero, as a bias before a batch norm has, nothing
# but rounding is left.
SMALLEST_SHARE = 0.01


def check(flags, devices, data, threads, build_model, build_gradients):
    """Says by how much the towers differ from one; see `--check`.

    Args:
      flags: what `command_line.parse` returned.
      devices: the `utils.Devices` of the run.
      data: the `DataSet`, of which the images' shape and the classes count.
      threads: what `utils.choose_threads` returned.
      build_model: (images, labels, training) -> `ModelSpec`, with nothing random.
      build_gradients: (device strings, batches, build_tower) -> (list of
        (gradient, variable), averaged over the towers, of all copies of the variables;
        op that gives the towers the same weights).

    Raises:
      RunFailed: by more than rounding explains.
    """
    num_towers = len(devices.towers)
    random = np.random.RandomState(flags.seed)
    shape = (flags.batch_size * num_towers,) + data.train.images.shape[1:]
    images = random.randint(0, 256, shape).astype(np.uint8)
    labels = random.randint(0, len(data.classes), shape[0]).astype(np.int64)
    normalized = False

    def compute(towers, weights=None):
        """Returns ({variable: weight}, {variable: gradient})."""
        nonlocal normalized
        group_size = len(towers) if flags.sync_batch_norm else None

        def build_tower(tower, images, labels):
            with batch_norm.in_tower(tower, group_size):
                return build_model(images, labels, training=True)

        with tf.Graph().as_default(), tf.device('/cpu:0'):
            tf.set_random_seed(flags.seed)
            fed = [tf.placeholder(a.dtype, a.shape) for a in (images, labels)]
            batches = list(zip(*[tf.split(t, len(towers)) for t in fed]))
            grads_and_vars, copy = build_gradients(towers, batches, build_tower)
            gradients = {
                variable.op.name: tf.convert_to_tensor(gradient)
                for gradient, variable in grads_and_vars
            }
            normalized = bool(
                batch_norm.average_statistics(len(towers))
                or batch_norm.get_own_updates()
            )
            variables = {v.op.name: v for v in tf.global_variables()}
            xla = utils.use_xla(flags.xla, towers)
            with utils.open_session(devices, threads, xla) as session:
                session.run(tf.global_variables_initializer())
                session.run(tf.local_variables_initializer())
                for name, value in (weights or {}).items():
                    variables[name].load(value, session)
                session.run(copy)
                weights = session.run(variables)
                try:
                    found = session.run(gradients, dict(zip(fed, (images, labels))))
                except tf.errors.InvalidArgumentError as error:
                    fault = updates.find_not_finite(error)
                    if not fault:
                        raise
                    raise RunFailed('check: %s' % fault) from None
        return weights, found

    weights, many = compute(devices.towers)
    _, one = compute(devices.towers[:1], weights)
    difference, name = find_largest_difference(one, many)
    told = 'check: %s of %d and one of %d, a step of plain SGD: %s differs by %.1e' % (
        utils.count(num_towers, 'tower'),
        *(flags.batch_size, shape[0], name, difference),
    )
    if difference <= LARGEST_DIFFERENCE:
        log.info('%s of its largest change, all others by less: they are one', told)
    elif normalized and not flags.sync_batch_norm:
        log.info(
            '%s of its largest change. Its batch norm has the statistics of each '
            "tower's own batch, so this must be; --sync_batch_norm makes them one",
            told,
        )
    else:
        raise RunFailed('%s of its largest change: the towers are not one' % told)


def find_largest_difference(one, many):
    """Returns (difference, name) of the variable whose gradients differ most.

    Args:
      one, many: {name: gradient}.
    """
    largest = {name: np.abs(gradient).max() for name, gradient in one.items()}
    floor = SMALLEST_SHARE * max(largest.values())
    differences = [
        (np.abs(one[name] - many[name]).max() / max(largest[name], floor, 1e-30), name)
        for name in one
    ]
    # What is no number is larger than any.
    return max(differences, key=lambda d: np.inf if np.isnan(d[0]) else d[0])
