"""The process of benchmark.py that measures what users might pick instead.

Same layers in the same order, batch per GPU, optimizer, dropout and metrics; the
libraries' own defaults for everything else, but that processes share the cores.
TensorFlow is imported here as its users do, not through tf1.py, which would turn
version 2's behaviour off.
"""

import contextlib
import datetime
import functools
import os
import sys
import time

import numpy as np

import benchmark_rounds

# Steps before the first round, and at least in each.
WARM_UP_STEPS = 20

FILTERS = (16, 32, 64)
UNITS = 128


@contextlib.contextmanager
def prepare(argument):
    """Builds and warms up a peer; see `benchmark_rounds.serve`.

    Args:
      argument: `peer`, a key of `PEERS`; `num_gpus`; `gpus`, their numbers, none for
        the CPU; `examples`, an .npz file with uint8 images
        [n, height, width, channels] and int64 labels [n]; `num_classes`;
        `batch_size`, per GPU; `dropout`; `optimizer`; `learning_rate`; `seconds`,
        about how long a round takes; `port`, a free one.
    """
    with contextlib.ExitStack() as stack:
        try:
            version, train = stack.enter_context(PEERS[argument['peer']](argument))
        except ImportError as error:
            yield {'missing': str(error)}, None
            return
        train(WARM_UP_STEPS)
        rate = WARM_UP_STEPS / train(WARM_UP_STEPS)
        steps = max(WARM_UP_STEPS, int(argument['seconds'] * rate))
        images = argument['batch_size'] * argument['num_gpus']
        yield (
            {'version': version, 'round_seconds': steps / rate},
            lambda: {'images_per_second': steps * images / train(steps)},
        )


def _load(argument):
    """Returns images, float32 in [-1, 1], and labels."""
    with np.load(argument['examples']) as file:
        return file['images'].astype(np.float32) / 127.5 - 1, file['labels']


# Each peer: (argument) -> a context manager (version, train). train: (steps) -> the
# seconds they took.


@contextlib.contextmanager
def _start_keras(argument):
    """Keras' `Model.fit` on arrays; on several devices under MirroredStrategy."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    import tensorflow as tf

    num_gpus, gpus = argument['num_gpus'], argument['gpus']
    config = tf.config.experimental
    visible = config.list_physical_devices('GPU')
    config.set_visible_devices([visible[number] for number in gpus], 'GPU')
    for number in gpus:
        config.set_memory_growth(visible[number], True)
    if not gpus and num_gpus > 1:
        config.set_virtual_device_configuration(
            config.list_physical_devices('CPU')[0],
            [config.VirtualDeviceConfiguration() for _ in range(num_gpus)],
        )
    images, labels = _load(argument)
    batch = argument['batch_size'] * num_gpus

    class Timer(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.perf_counter() - self.began

    def train(steps):
        timer = Timer()
        seconds = 0.0
        while steps:
            now = min(steps, len(images) // batch)
            model.fit(
                images[: now * batch],
                labels[: now * batch],
                batch_size=batch,
                epochs=1,
                verbose=0,
                callbacks=[timer],
            )
            seconds += timer.seconds
            steps -= now
        return seconds

    with contextlib.ExitStack() as scope:
        if num_gpus > 1:
            kind = 'gpu' if gpus else 'cpu'
            names = ['/%s:%d' % (kind, i) for i in range(num_gpus)]
            scope.enter_context(tf.distribute.MirroredStrategy(names).scope())
        model = _build_keras(tf.keras, images.shape[1:], argument)
    yield tf.__version__, train


def _build_keras(keras, shape, argument):
    layers = keras.layers
    stack = [layers.InputLayer(shape)]
    for filters in FILTERS:
        stack.append(layers.Conv2D(filters, 3, padding='same'))
        stack.append(layers.MaxPool2D(2, padding='same'))
        stack.append(layers.Activation('relu'))
    stack += [
        layers.Flatten(),
        layers.Dropout(argument['dropout']),
        layers.Dense(UNITS, activation='relu'),
        layers.Dropout(argument['dropout']),
        layers.Dense(argument['num_classes']),
    ]
    model = keras.Sequential(stack)
    model.compile(
        optimizer={
            'adam': keras.optimizers.Adam,
            'sgd': keras.optimizers.SGD,
            'momentum': functools.partial(keras.optimizers.SGD, momentum=0.9),
            'rmsprop': keras.optimizers.RMSprop,
        }[argument['optimizer']](argument['learning_rate']),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=['accuracy'],
    )
    return model


@contextlib.contextmanager
def _start_torch(argument):
    """PyTorch, eager; on several devices DistributedDataParallel, a process each."""
    import torch

    num_gpus = argument['num_gpus']
    if num_gpus == 1:
        yield torch.__version__, _build_torch(argument, 0)
        return
    context = torch.multiprocessing.get_context('spawn')
    others = []
    for rank in range(1, num_gpus):
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=_follow, args=(argument, rank, theirs), daemon=True
        )
        process.start()
        others.append(pipe)
    train = _build_torch(argument, 0)

    def train_all(steps):
        for pipe in others:
            pipe.send(steps)
        return train(steps)

    yield torch.__version__, train_all


def _follow(argument, rank, pipe):
    """A further process of DistributedDataParallel: trains when rank 0 does."""
    train = _build_torch(argument, rank)
    while True:
        train(pipe.recv())


def _build_torch(argument, rank):
    """Returns (steps) -> seconds, of the process with this rank."""
    import torch
    from torch import nn

    images, labels = _load(argument)
    gpus, num_gpus = argument['gpus'], argument['num_gpus']
    device = torch.device('cuda:%d' % gpus[rank] if gpus else 'cpu')
    images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    images, labels = images.to(device), torch.from_numpy(labels).to(device)
    layers, channels, size = [], images.shape[1], images.shape[2]
    for filters in FILTERS:
        layers.append(nn.Conv2d(channels, filters, 3, padding=1))
        layers += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
        channels, size = filters, (size + 1) // 2
    layers += [
        nn.Flatten(),
        nn.Dropout(argument['dropout']),
        nn.Linear(channels * size * size, UNITS),
        nn.ReLU(),
        nn.Dropout(argument['dropout']),
        nn.Linear(UNITS, argument['num_classes']),
    ]
    model = nn.Sequential(*layers).to(device)
    if num_gpus > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_gpus))
        torch.distributed.init_process_group(
            'nccl' if gpus else 'gloo',
            init_method='tcp://127.0.0.1:%d' % argument['port'],
            rank=rank,
            world_size=num_gpus,
            timeout=datetime.timedelta(seconds=60),
        )
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=[device] if gpus else None
        )
    optimizer = {
        'adam': torch.optim.Adam,
        'sgd': torch.optim.SGD,
        'momentum': functools.partial(torch.optim.SGD, momentum=0.9),
        'rmsprop': torch.optim.RMSprop,
    }[argument['optimizer']](model.parameters(), argument['learning_rate'])
    loss_of = nn.CrossEntropyLoss()
    batch = argument['batch_size']
    sums = torch.zeros(2, device=device)

    def train(steps):
        began = time.perf_counter()
        order = torch.randperm(len(images), device=device)
        for step in range(steps):
            start = (step * num_gpus + rank) * batch % (len(images) - batch + 1)
            rows = order[start : start + batch]
            optimizer.zero_grad(set_to_none=True)
            logits = model(images[rows])
            loss = loss_of(logits, labels[rows])
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                sums[0] += loss * batch
                sums[1] += (logits.argmax(1) == labels[rows]).sum()
        sums.tolist()  # waits for a GPU
        return time.perf_counter() - began

    return train


PEERS = {'keras': _start_keras, 'torch': _start_torch}

if __name__ == '__main__':
    sys.exit(benchmark_rounds.serve(prepare))
