"""Placement for GPUs, proven on machines without one.

TensorFlow's GPU wheels register their GPU kernels whether or not there is a GPU: an
op has one for its types, or the real session would refuse it (soft placement is off).
"""

import pytest

import train
import train_multi_gpu
import training
from command_line import OPTIMIZERS
from tests.conftest import make_flags
from tf1 import tf

GPU_KERNELS = pytest.importorskip('tensorflow.python.framework.kernels')


def has_gpu_kernel(op):
    """Whether the kernel registry has a GPU kernel for this op and its types."""
    attributes = op.node_def.attr
    for kernel in GPU_KERNELS.get_registered_kernels_for_op(op.type).kernel:
        if (
            kernel.device_type in ('GPU', 'DEFAULT')
            and kernel.label == attributes['_kernel'].s.decode()
            and all(
                attributes[constraint.name].type in constraint.allowed_values.list.type
                for constraint in kernel.constraint
            )
        ):
            return True
    return False


@pytest.fixture
def gpu_build():
    if not any(
        kernel.device_type == 'GPU'
        for kernel in GPU_KERNELS.get_registered_kernels_for_op('Conv2D').kernel
    ):
        pytest.skip('this TensorFlow was built without GPU kernels')


def build(script, devices, small, *argv):
    flags = make_flags('--batch_size', '8', *argv)
    job = script.build_job(flags, devices, small)
    training.build_end_of_epoch(job.state)
    tf.train.Saver()
    return tf.get_default_graph().get_operations()


def on_gpu(op):
    return 'gpu' in op.device.lower()


def test_the_proof_refuses_what_has_no_gpu_kernel(gpu_build):
    with tf.device('/gpu:0'):
        good = tf.constant([1.0]) + 1.0
        string = tf.strings.join([tf.constant('a'), tf.constant('b')])
        split = tf.split(tf.zeros([4], tf.uint8), 2)
        counter = tf.Variable(0, dtype=tf.int32)
    assert has_gpu_kernel(good.op)
    for op in (string.op, split[0].op, counter.op):
        assert not has_gpu_kernel(op), op.type


RECIPE = ['--weight_decay', '0.1', '--clip_norm', '1', '--label_smoothing', '0.1']
MEMORY = ['--fp16', '--ema', '0.9', '--accumulate', '3']
LEVERS = [
    [],
    RECIPE,
    MEMORY,
    ['--variables', 'replicated'] + MEMORY + RECIPE,
    ['--variable_device', 'spread'] + MEMORY + RECIPE,
    ['--variable_device', 'spread'] + RECIPE,
    ['--staging', '--gradient_packs', '3'],
    ['--variable_device', 'gpu'],
    ['--variable_device', 'gpu', '--gradient_packs', '2'],
    ['--variable_device', 'spread'],
    ['--variables', 'replicated', '--staging'],
    ['--variable_device', 'spread', '--gradient_packs', '1', '--staging'],
]


@pytest.mark.parametrize(
    'optimizer, levers',
    [('adam', levers) for levers in LEVERS]
    + [
        (optimizer, levers)
        for optimizer in OPTIMIZERS
        if optimizer != 'adam'
        for levers in LEVERS[-2:]
    ],
)
def test_every_op_of_four_gpu_towers_has_a_gpu_kernel(
    gpu_build, small, optimizer, levers
):
    devices = ['/gpu:%d' % i for i in range(4)]
    ops = build(train_multi_gpu, devices, small, '--optimizer', optimizer, *levers)
    placed = [op for op in ops if on_gpu(op)]
    assert len(placed) > 400
    wrong = ['%s (%s)' % (op.name, op.type) for op in placed if not has_gpu_kernel(op)]
    assert not wrong


def test_every_op_of_a_synchronized_batch_norm_has_a_gpu_kernel(gpu_build, small):
    devices = ['/gpu:%d' % i for i in range(2)]
    argv = ['--model', 'article', '--sync_batch_norm', '--variable_device', 'gpu']
    ops = build(train_multi_gpu, devices, small, *argv)
    placed = [op for op in ops if on_gpu(op)]
    assert {'CollectiveReduce', 'IdentityN'} <= {op.type for op in placed}
    wrong = ['%s (%s)' % (op.name, op.type) for op in placed if not has_gpu_kernel(op)]
    assert not wrong


@pytest.mark.parametrize('more', [RECIPE, MEMORY + RECIPE])
def test_every_op_of_the_baseline_has_a_gpu_kernel(gpu_build, small, more):
    ops = build(train, '/gpu:0', small, '--staging', *more)
    placed = [op for op in ops if on_gpu(op)]
    assert len(placed) > 100
    wrong = ['%s (%s)' % (op.name, op.type) for op in placed if not has_gpu_kernel(op)]
    assert not wrong


def test_each_towers_forward_and_backward_ops_are_on_its_gpu(small):
    devices = ['/gpu:%d' % i for i in range(4)]
    ops = build(train_multi_gpu, devices, small)
    for tower in range(4):
        here = [op for op in ops if op.name.startswith('tower_%d/' % tower)]
        for kind in ('Conv2D', 'Conv2DBackpropFilter', 'MatMul', 'StatelessRandom'):
            found = [op for op in here if op.type.startswith(kind)]
            assert found, kind
            for op in found:
                assert op.device.lower().endswith('gpu:%d' % tower), op.name
        assert 'Conv2DBackpropInput' in {op.type for op in here}


def test_shared_things_are_on_the_cpu(small):
    devices = ['/gpu:%d' % i for i in range(4)]
    ops = build(train_multi_gpu, devices, small)
    shared = ('Variable', 'Queue', 'FIFO', 'Apply', 'Assign', 'AddN', 'Save', 'Restore')
    found = set()
    for op in ops:
        if op.type.startswith(shared):
            # A colocated op has no device of its own: it follows its variable.
            followed = [g for g in op.colocation_groups() if b'loc:@' in g]
            named = [
                tf.get_default_graph().get_operation_by_name(g[5:].decode())
                for g in followed
            ]
            for place in [op] + named:
                assert not on_gpu(place), '%s is on %s' % (op.name, place.device)
            found.add(op.type)
    assert {'VariableV2', 'FIFOQueueV2', 'QueueDequeueV2', 'ApplyAdam'} <= found


def test_staging_areas_and_packs_are_on_the_towers_gpu(small):
    devices = ['/gpu:%d' % i for i in range(4)]
    ops = build(train_multi_gpu, devices, small, '--staging', '--gradient_packs', '2')
    for kind in ('Stage', 'Unstage'):
        places = [op.device.lower()[-5:] for op in ops if op.type == kind]
        assert places == ['gpu:%d' % i for i in range(4)], kind
    queues = [op for op in ops if op.type == 'QueueDequeueV2']
    assert len(queues) == 4 and not any(map(on_gpu, queues))


@pytest.mark.parametrize(
    'choice, places',
    [
        ('cpu', ['cpu:0'] * 10),
        ('gpu', ['gpu:0'] * 10),
        # Bytes: conv1 576 and 64, conv2 18432 and 128, conv3 73728 and 256, dense1
        # 524288 and 512, dense2 5120 and 40. Each goes where the fewest are.
        ('spread', 'gpu:0 gpu:1 gpu:1 gpu:0 gpu:0 gpu:1 gpu:1 gpu:0 gpu:0 gpu:0'),
    ],
)
def test_variables_and_their_slots_are_where_the_flag_says(small, choice, places):
    devices = ['/gpu:0', '/gpu:1']
    build(train_multi_gpu, devices, small, '--variable_device', choice)
    places = places.split() if isinstance(places, str) else places
    variables = tf.trainable_variables()
    assert [v.device.lower()[-5:] for v in variables] == places
    everything = {v.op.name: v for v in tf.global_variables()}
    for variable in variables:
        for slot in ('/Adam', '/Adam_1'):
            assert everything[variable.op.name + slot].device == variable.device
    for name, variable in everything.items():
        if name.startswith(('global_step', 'training/')):
            assert 'cpu:0' in variable.device.lower(), name


def test_replicated_variables_their_slots_and_their_updates_are_on_the_towers_gpu(
    small,
):
    devices = ['/gpu:%d' % i for i in range(4)]
    ops = build(train_multi_gpu, devices, small, '--variables', 'replicated')
    own = tf.trainable_variables()
    own += [
        v for v in tf.global_variables() if v.op.name.endswith(('/Adam', '/Adam_1'))
    ]
    for variable in own:
        assert variable.device.lower().endswith('gpu:0')
    copies = [v for v in tf.local_variables() if v.op.name.startswith('replica_')]
    assert len(own) == 30 and len(copies) == 3 * (30 + 2)  # and Adam's two powers
    for variable in copies:
        tower = int(variable.op.name[len('replica_')])
        assert variable.device.lower().endswith('gpu:%d' % tower), variable.op.name
    updates = [op for op in ops if op.type == 'ApplyAdam']
    assert len(updates) == 4 * 10
    for op in updates:
        # It follows its variable.
        (group,) = op.colocation_groups()
        assert group[5:].decode() == op.inputs[0].op.name
        for tensor in op.inputs:
            if 'average' in tensor.op.name:
                assert tensor.device == op.inputs[0].device
    reduces = [op for op in ops if op.type == 'CollectiveReduce']
    assert [op.device.lower()[-5:] for op in reduces] == [
        'gpu:%d' % i for i in range(4)
    ]
    for name in ('global_step', 'training/epoch'):
        op = tf.get_default_graph().get_operation_by_name(name)
        assert not on_gpu(op)


@pytest.mark.parametrize('variables', ['shared', 'replicated'])
def test_only_initial_values_are_left_to_the_placer(small, variables):
    devices = ['/gpu:0', '/gpu:1']
    ops = build(train_multi_gpu, devices, small, '--variables', variables)
    homeless = [
        op.name for op in ops if not op.device and '/Initializer/' not in op.name
    ]
    assert not homeless


def test_twelve_towers_build_and_run(run_steps):
    values = run_steps(2, '--num_gpus', '12', '--batch_size', '4')
    assert values['global_step'] == 2
    assert values['training/epoch_images'] == 96
