"""The towers that evaluate, and the score over a whole data set."""

import collections

import numpy as np

import input_pipeline
import utils
from tf1 import tf

BATCH = 250  # images per tower and run

# start: int32 scalar placeholder, the first row. losses: float32, predictions: int64,
# both [towers * BATCH], for the rows from `start` on (the last row repeats).
Evaluation = collections.namedtuple('Evaluation', 'start losses predictions labels')


def build(examples, devices, build_model):
    """Builds the towers that evaluate; the model's variables must exist.

    Args:
      examples: `Examples` to evaluate on.
      devices: a device string per tower.
      build_model: (images, labels) -> `ModelSpec`, without dropout.

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
                rows = tf.range(BATCH) + (start + tower * BATCH)
                rows = tf.minimum(rows, len(examples.labels) - 1)
                batch = tf.gather(images, rows), tf.gather(labels, rows)
            with utils.on_tower(device, reuse=True):
                specs.append(build_model(*batch))
        with tf.device('/cpu:0'):
            losses = tf.concat([spec.losses for spec in specs], axis=0)
            predictions = tf.concat([spec.predictions for spec in specs], axis=0)
    evaluation = Evaluation(start, losses, predictions, examples.labels)
    return evaluation, {**feed_images, **feed_labels}


def make_evaluate(session, evaluation, find_stop=lambda: None):
    """Returns a function () -> (mean loss, accuracy) over all examples, floats.

    Losses and predictions are reduced here in the examples' order: the same score
    for any number of towers.

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

    def evaluate():
        parts = []
        for start in range(0, len(labels), rows):
            utils.raise_if(find_stop())
            parts.append(read(start))
        losses, predictions = (
            np.concatenate(part)[: len(labels)] for part in zip(*parts)
        )
        loss = losses.mean(dtype=np.float64)
        return float(loss), float((predictions == labels).mean())

    return evaluate
