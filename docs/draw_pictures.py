"""Draws the pictures of README.md and how-it-works.md from a run and the real graph.

    python train_multi_gpu.py --num_gpus 2 --trace 5000 --model_dir runs/pictures
    python docs/draw_pictures.py runs/pictures

Needs matplotlib and tensorboard (pip), Graphviz's `dot` and a `chromium`.
"""

import collections
import contextlib
import glob
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import matplotlib
from matplotlib import pyplot

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import command_line  # noqa: E402
import data_sets  # noqa: E402
import model  # noqa: E402
import train_multi_gpu  # noqa: E402
from tf1 import tf  # noqa: E402
from utils import VARIABLE_OPS  # noqa: E402

COLOURS = {
    'forward': '#4c78a8',
    'backward': '#f58518',
    'average': '#54a24b',
    'update': '#b279a2',
    'other': '#bab0ac',
}


def main(model_dir):
    pictures = os.path.join(ROOT, 'docs', 'pictures')
    os.makedirs(pictures, exist_ok=True)
    (trace,) = glob.glob(os.path.join(model_dir, 'trace-*.json'))
    draw_step(trace, os.path.join(pictures, 'step.png'))
    draw_graph(os.path.join(pictures, 'graph.png'))
    draw_digit(os.path.join(pictures, 'seven.png'))
    shoot_tensorboard(model_dir, os.path.join(pictures, 'tensorboard.png'))


# The towers of one step, from its trace


def draw_step(trace, path):
    """Draws when the ops of each tower ran; on /cpu:0 are the shared ones, too."""
    with open(trace) as file:
        events = json.load(file)['traceEvents']
    rows = collections.defaultdict(list)
    for event in events:
        if event['ph'] == 'X':
            row, kind = classify(event['args']['name'])
            rows[row].append((event['ts'] / 1000, event['dur'] / 1000, kind))
    first = min(start for row in rows.values() for start, _, _ in row)
    matplotlib.rcParams.update({'font.size': 9, 'svg.hashsalt': 'fixed'})
    figure, axes = pyplot.subplots(figsize=(9, 2.2))
    for height, row in enumerate(sorted(rows, reverse=True)):
        for start, length, kind in rows[row]:
            bar = [(start - first, max(length, 0.005))]
            axes.broken_barh(bar, (height - 0.4, 0.8), color=COLOURS[kind])
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(sorted(rows, reverse=True))
    axes.set_xlabel('ms')
    axes.set_xlim(0)
    handles = [matplotlib.patches.Patch(color=c, label=k) for k, c in COLOURS.items()]
    axes.legend(
        handles=handles, ncol=5, loc='lower center', bbox_to_anchor=(0.5, 1), frameon=0
    )
    figure.savefig(path, dpi=110, bbox_inches='tight')


def classify(name):
    """Returns (row, kind) of an op, by its name."""
    tower = re.match(r'(tower_\d+)/', name)
    if tower:
        back = '/gradients/' in name or re.search(r'/(Sum|CheckNum|Identity)', name)
        return tower.group(1).replace('_', ' '), 'backward' if back else 'forward'
    if name.startswith('average'):
        return 'variables', 'average'
    if name.startswith('Adam') or 'AssignAdd' in name:
        return 'variables', 'update'
    return 'variables', 'other'


# The graph of one step


def draw_graph(path):
    """Draws the graph that two GPUs train on, the ops of one job put together."""
    flags = command_line.parse('', model.NETWORKS, True, ['--num_gpus', '2'])
    data = data_sets.load(flags)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        job = train_multi_gpu.build_job(flags, ['/gpu:0', '/gpu:1'], data)
        order, gather = tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS)
        ordering, gathering = reach(order.enqueue_ops), reach(gather.enqueue_ops)
        groups = {}
        for op in reach([job.step.train_op.op]) | ordering | gathering:
            if op in ordering:
                groups[op] = group_of(op, 'thread 1: order of the epoch')
            elif op in gathering:
                groups[op] = group_of(op, 'thread 2: gather images')
            else:
                groups[op] = group_of(op)
    dot = describe_groups(groups)
    subprocess.run(['dot', '-Tpng', '-o', path], input=dot.encode(), check=True)


def reach(ops):
    """Returns the set of all ops that these need."""
    found, to_do = set(), list(ops)
    while to_do:
        op = to_do.pop()
        if op not in found:
            found.add(op)
            to_do += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def group_of(op, thread=None):
    """Returns the name of the group that an op is drawn in."""
    if 'index_queue' in op.name and op.type == 'FIFOQueueV2':
        return 'index queue'
    if op.type == 'FIFOQueueV2' or 'batch_queue_Dequeue' in op.name:
        return 'batch queue'
    if thread and op.name.startswith('input/'):
        return thread
    tower, kind = classify(op.name)
    if tower != 'variables':
        return '%s: %s' % (tower, kind)
    if kind == 'average':
        return 'average_gradients'
    if op.type in VARIABLE_OPS or op.name.endswith('/read'):
        return 'shared variables'
    if kind == 'update':
        return 'apply_gradients'
    return 'learning rate, sums of loss and accuracy'


def describe_groups(groups):
    """Returns the picture in Graphviz's language."""
    members = collections.defaultdict(list)
    edges = collections.Counter()
    for op, group in groups.items():
        members[group].append(op)
        for tensor in op.inputs:
            edge = groups[tensor.op], group
            if op.type.startswith('QueueEnqueue') and tensor.op.type == 'FIFOQueueV2':
                edge = edge[::-1]  # what is enqueued goes the other way
            if groups[tensor.op] != group:
                edges[edge] += 1
    lines = [
        'digraph { rankdir=LR; dpi=80; nodesep=0.25; ranksep=0.4;',
        'node [shape=box, style="filled,rounded", fillcolor="#e8eef7", fontname=Arial]',
        'edge [fontname=Arial, fontsize=10, color="#707070"]',
    ]
    devices = collections.defaultdict(list)
    for group, ops in members.items():
        device = '/gpu:%s' % group[6] if group.startswith('tower') else '/cpu:0'
        node = '"%s" [label="%s\\n%d ops"]' % (
            group,
            group.replace(': ', '\\n'),
            len(ops),
        )
        devices[device].append(node)
    for device, nodes in sorted(devices.items()):
        if device == '/cpu:0':
            lines += nodes
        else:
            lines.append(
                'subgraph "cluster%s" { label="%s"; color="#4c78a8"; fontname=Arial;'
                % (device, device)
            )
            lines += nodes + ['}']
    for (source, target), count in sorted(edges.items()):
        weak = 'constraint=false, ' if target == 'shared variables' else ''
        lines.append('"%s" -> "%s" [%slabel="%d"]' % (source, target, weak, count))
    return '\n'.join(lines + ['}'])


# A digit as a scanner gives it: large, dark on light


def draw_digit(path):
    """Draws the first test image of MNIST, for predict.py."""
    data = data_sets.load(command_line.parse('', model.NETWORKS, True, []))
    figure = pyplot.figure(figsize=(2, 2))
    axes = figure.add_axes([0, 0, 1, 1])
    axes.imshow(data.valid.images[0, :, :, 0], cmap='gray_r', interpolation='bicubic')
    axes.axis('off')
    figure.savefig(path, dpi=100)


# The page of a real TensorBoard


def shoot_tensorboard(model_dir, path):
    """Photographs the scalars that a real TensorBoard shows of the run."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    address = 'http://127.0.0.1:%d/' % port
    # Relative: the page shows it.
    argv = ['--logdir', os.path.relpath(model_dir), '--port', str(port)]
    argv += ['--host', '127.0.0.1']
    server = subprocess.Popen([sys.executable, '-m', 'tensorboard.main'] + argv)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                if len(json.load(urllib.request.urlopen(address + 'data/runs'))) == 2:
                    break
            time.sleep(0.2)
        # The curves are drawn by WebGL, which is software here.
        browser = ['chromium', '--headless', '--no-sandbox', '--hide-scrollbars']
        browser += ['--use-angle=swiftshader', '--enable-unsafe-swiftshader']
        browser += ['--window-size=1200,800', '--virtual-time-budget=30000']
        browser += ['--screenshot=' + path, address + '?darkMode=false#scalars']
        subprocess.run(browser, check=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == '__main__':
    main(sys.argv[1])
