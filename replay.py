"""Calls that are recorded once per size and then replayed: CUDA graphs, or on a CPU the same without the graph."""

from collections.abc import Callable

import torch
from torch import Tensor


class Replayed:
    """`function(*tensors)`, recorded for every length of its first argument, and run again on the same memory.

    A CUDA graph works on fixed addresses: arguments are copied into the tensors it was recorded with, and results stay
    valid until the next replay of any recording that shares the pool. On a CPU there is nothing to record, but the
    same copies are made, so that sizes, padding and reuse can be tested there. What the function writes (caches) must not
    mind being written twice: recording runs it more than once.
    """

    def __init__(self, function: Callable):
        self.function, self.pool = function, None
        self.recorded = {}  # (length, number of arguments) -> graph or None, arguments, results

    def __call__(self, *inputs: Tensor):
        key = len(inputs[0]), len(inputs)
        if key not in self.recorded:
            self.recorded[key] = self.record(inputs)
        graph, arguments, results = self.recorded[key]
        for argument, given in zip(arguments, inputs):
            argument.copy_(given)
        if graph is None:
            return self.function(*arguments)
        graph.replay()
        return results

    def record(self, inputs: tuple[Tensor, ...]) -> tuple:
        arguments = [given.clone() for given in inputs]
        if not arguments[0].is_cuda:
            return None, arguments, None
        stream = torch.cuda.Stream()  # compiling and autotuning must be over before a graph is recorded
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            results = self.function(*arguments)
        self.pool = graph.pool()
        return graph, arguments, results
