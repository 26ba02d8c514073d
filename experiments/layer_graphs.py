"""Convolutional networks as graphs of layers, with FLOPs, bytes and a model of each layer's time on a V100.

The five networks of Checkmate's table of ratios (Jain et al., MLSys 2020) in their published form: VGG16 and VGG19
(Simonyan and Zisserman 2015), MobileNet (Howard et al. 2017) and ResNet50 (He et al. 2016) as Keras Applications builds
them at 224x224, and the U-Net with a VGG16 encoder of keras-segmentation at 416x608 with 19 classes. A node is a Keras
layer, an activation that is an argument of its layer included; padding, flattening and reshaping are nodes as well,
with an output of their own, since that is how the paper's graphs count memory.

Three models of cost:

- `flops`: multiply-adds of a product, 4 an element of batch normalization, 1 an operand's element of an activation or a
  sum, 0 for pooling and copies; backward twice the forward. The `flops` platform of the paper's artifact.
- `v100`: microseconds of a V100, a kernel's time being the larger of operations / peak and bytes / bandwidth, with the
  rates of the data sheet (SXM2: 15.7 TFLOP/s float32, 900 GB/s). Backward has a kernel for the gradient of the input,
  and one for that of the weights where there are some. Left out: launches, and how far kernels stay below the rates.
- `v100-input`: the same without the weights' kernel. The table was computed with times measured on a V100 that are not
  published, and the program that measured them differentiates a layer by its *input* alone and takes one kernel. So a
  convolution's backward costs there what its forward does, and running all of forward again costs half of a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FLOPS_PER_US = 15.7e6
BYTES_PER_US = 900e3
ITEM_BYTES = 4
"""float32."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer of a network, for one example.

    Attributes:
      name: in its network.
      inputs: positions of the layers that it reads; none for one that reads only the network's input.
      read, written: elements of its operands and of its output.
      macs: multiply-adds of its products.
      ops: other operations.
      weights: elements of its parameters.
    """

    name: str
    inputs: tuple[int, ...]
    read: int
    written: int
    macs: int = 0
    ops: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they first run, each an operation with one result.

    Attributes:
      names: of the nodes.
      inputs: positions of what each node reads, all smaller than its own.
      cost: of running each node once, in any unit.
      bytes: of each node's result.
      forward: how many of the first nodes may run again; the others (loss and backward) run once.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    cost: tuple[float, ...]
    bytes: tuple[int, ...]
    forward: int

    def __len__(self) -> int:
        return len(self.names)

    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each node's result, in order."""
        found: list[list[int]] = [[] for _ in self.names]
        for node, inputs in enumerate(self.inputs):
            for each in inputs:
                found[each].append(node)
        return tuple(map(tuple, found))

    def is_chain(self) -> bool:
        """Whether each forward node reads the one before it and nothing else."""
        return all(inputs == ((node - 1,) if node else ()) for node, inputs in enumerate(self.inputs[: self.forward]))

    def smallest_budget(self) -> int:
        """Bytes that some forward node needs for itself and its operands: below it no schedule exists."""
        sizes = (self.bytes[node] + sum(self.bytes[each] for each in self.inputs[node]) for node in range(self.forward))
        return max(sizes)


def training_graph(
    names: Sequence[str],
    inputs: Sequence[Sequence[int]],
    cost: Sequence[float],
    size: Sequence[int],
    backward_cost: Sequence[float] | None = None,
    loss_bytes: int = 0,
) -> Graph:
    """A step of training from its forward layers: the layers, a loss, and a gradient for each layer in reverse.

    The gradient of a layer's result has its size. It reads the result, the results of the layers that read it, and
    their gradients, as in the graphs of the paper. `backward_cost` is by layer and twice its cost by default.
    """
    count = len(names)
    last = 2 * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for node, each in enumerate(inputs):
        for operand in each:
            readers[operand].append(node)
    gradients: list[tuple[int, ...]] = []
    for node in reversed(range(count)):
        after = readers[node]
        gradients.append(tuple(sorted({node, *after, *(last - each for each in after), *(() if after else (count,))})))
    backward = backward_cost if backward_cost is not None else [2 * each for each in cost]
    return Graph(
        (*names, "loss", *(f"d {name}" for name in reversed(names))),
        (*(tuple(sorted(set(each))) for each in inputs), (count - 1,), *gradients),
        (*cost, 0.0, *reversed(backward)),
        (*size, loss_bytes, *reversed(size)),
        count,
    )


class _Net:
    """Layers as they are added; a place is (position of a layer or -1, shape of its output)."""

    def __init__(self, *shape: int) -> None:
        self.layers: list[Layer] = []
        self.place: tuple[int, Shape] = (-1, shape)

    def add(
        self,
        name: str,
        shape: Shape,
        *,
        macs: int = 0,
        ops: int = 0,
        weights: int = 0,
        also: Sequence[tuple[int, Shape]] = (),
    ) -> None:
        operands = [self.place, *also]
        inputs = tuple(position for position, _ in operands if position >= 0)
        read = sum(math.prod(each) for _, each in operands)
        self.layers.append(Layer(name, inputs, read, math.prod(shape), macs, ops, weights))
        self.place = (len(self.layers) - 1, shape)

    def conv(self, channels: int, kernel: int = 3, stride: int = 1, valid: bool = False, name: str = "conv") -> None:
        height, width, before = self.place[1]
        taken = kernel - 1 if valid else 0
        shape = (-(-(height - taken) // stride), -(-(width - taken) // stride), channels)
        weights = kernel * kernel * before * channels
        self.add(name, shape, macs=kernel * kernel * before * math.prod(shape), weights=weights)

    def depthwise(self, stride: int = 1, valid: bool = False) -> None:
        height, width, channels = self.place[1]
        taken = 2 if valid else 0
        shape = (-(-(height - taken) // stride), -(-(width - taken) // stride), channels)
        self.add("depthwise", shape, macs=9 * math.prod(shape), weights=9 * channels)

    def norm(self) -> None:
        self.add("norm", self.place[1], ops=4 * math.prod(self.place[1]))

    def relu(self) -> None:
        self.add("relu", self.place[1], ops=math.prod(self.place[1]))

    def pad(self, *edges: int) -> None:
        height, width, channels = self.place[1]
        self.add("pad", (height + sum(edges), width + sum(edges), channels))

    def pool(self, window: int = 2, stride: int = 2) -> None:
        height, width, channels = self.place[1]
        self.add("pool", ((height - window) // stride + 1, (width - window) // stride + 1, channels))

    def mean(self) -> None:
        self.add("mean", self.place[1][-1:])

    def dense(self, width: int) -> None:
        before = math.prod(self.place[1])
        self.add("dense", (width,), macs=before * width, weights=before * width)


def vgg(*convolutions: int) -> list[Layer]:
    """VGG with so many convolutions in each of its five stages: (2, 2, 3, 3, 3) is VGG16, (2, 2, 4, 4, 4) VGG19."""
    net = _Net(224, 224, 3)
    for count, channels in zip(convolutions, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            net.conv(channels)
        net.pool()
    net.add("flatten", (math.prod(net.place[1]),))
    for width in (4096, 4096, 1000):
        net.dense(width)
    return net.layers


def mobilenet() -> list[Layer]:
    """MobileNet v1, width 1: a convolution and 13 pairs of a depthwise and a pointwise one."""
    net = _Net(224, 224, 3)
    net.pad(0, 1)
    net.conv(32, 3, 2, valid=True)
    net.norm()
    net.relu()
    widths = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for channels, stride in widths:
        if stride == 2:
            net.pad(0, 1)
        net.depthwise(stride, valid=stride == 2)
        net.norm()
        net.relu()
        net.conv(channels, 1)
        net.norm()
        net.relu()
    net.mean()
    net.add("reshape", (1, 1, 1024))
    net.add("dropout", (1, 1, 1024))
    net.conv(1000, 1)
    net.add("reshape", (1000,))
    net.add("softmax", (1000,), ops=1000)
    return net.layers


def resnet50() -> list[Layer]:
    """ResNet50, with its stride in a block's first convolution."""
    net = _Net(224, 224, 3)
    net.pad(3, 3)
    net.conv(64, 7, 2, valid=True)
    net.norm()
    net.relu()
    net.pad(1, 1)
    net.pool(3)
    for channels, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            entry = shortcut = net.place
            if block == 0:
                net.conv(4 * channels, 1, stride)
                net.norm()
                shortcut = net.place
                net.place = entry
            net.conv(channels, 1, stride)
            net.norm()
            net.relu()
            net.conv(channels)
            net.norm()
            net.relu()
            net.conv(4 * channels, 1)
            net.norm()
            net.add("add", net.place[1], ops=2 * math.prod(net.place[1]), also=[shortcut])
            net.relu()
    net.mean()
    net.dense(1000)
    return net.layers


def unet(classes: int = 19) -> list[Layer]:
    """The U-Net of keras-segmentation: four stages of VGG16 down, three steps up, a convolution to classes."""
    net = _Net(416, 608, 3)
    skips = []
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512)):
        for _ in range(count):
            net.conv(channels)
        net.pool()
        skips.append(net.place)
    for step, channels in enumerate((512, 256, 128, 64)):
        if step:
            height, width, before = net.place[1]
            net.add("upsample", (2 * height, 2 * width, before), ops=4 * math.prod(net.place[1]))
            skip = skips[3 - step]
            net.add("concatenate", (*skip[1][:2], before + skip[1][2]), also=[skip])
        net.pad(1, 1)
        net.conv(channels, valid=True)
        net.norm()
    net.conv(classes)
    net.add("reshape", (math.prod(net.place[1][:2]), classes))
    net.add("softmax", net.place[1], ops=math.prod(net.place[1]))
    return net.layers


def flops_cost(layer: Layer, batch: int) -> tuple[float, float]:
    """(forward, backward) in operations."""
    forward = float(batch * (layer.macs + layer.ops))
    return forward, 2 * forward


def v100_cost(layer: Layer, batch: int, by_weights: bool = True) -> tuple[float, float]:
    """(forward, backward) in microseconds; the backward without the weights' gradient when not `by_weights`.

    The input's gradient is made of the output's gradient and the weights, or of the layer's input where there are none;
    the weights' gradient of the output's gradient and the input.
    """
    work = 2 * batch * layer.macs / FLOPS_PER_US
    moved = ITEM_BYTES * (batch * (layer.read + layer.written) + layer.weights) / BYTES_PER_US
    operand = 0.0 if layer.macs else ITEM_BYTES * batch * layer.read / BYTES_PER_US
    backward = max(work, moved + operand)
    if by_weights and layer.weights:
        backward += max(work, moved)
    return max(work, moved), backward


def v100_input_cost(layer: Layer, batch: int) -> tuple[float, float]:
    """(forward, backward) in microseconds, the backward by the input alone."""
    return v100_cost(layer, batch, by_weights=False)


COSTS: dict[str, Callable[[Layer, int], tuple[float, float]]] = {
    "flops": flops_cost,
    "v100": v100_cost,
    "v100-input": v100_input_cost,
}
NETWORKS: dict[str, tuple[Callable[[], list[Layer]], int]] = {
    "MobileNet": (mobilenet, 512),
    "VGG16": (lambda: vgg(2, 2, 3, 3, 3), 256),
    "VGG19": (lambda: vgg(2, 2, 4, 4, 4), 256),
    "U-Net": (unet, 32),
    "ResNet50": (resnet50, 256),
}
"""The networks and the batch of each in the paper's sweep of budgets."""


def network_graph(name: str, cost: str) -> Graph:
    """The training graph of a network with one of the COSTS; bytes are of float32 results, parameters left out."""
    build, batch = NETWORKS[name]
    layers = build()
    costs = [COSTS[cost](layer, batch) for layer in layers]
    return training_graph(
        [f"{position} {layer.name}" for position, layer in enumerate(layers)],
        [layer.inputs for layer in layers],
        [forward for forward, _ in costs],
        [ITEM_BYTES * batch * layer.written for layer in layers],
        [backward for _, backward in costs],
        loss_bytes=ITEM_BYTES * batch,
    )
