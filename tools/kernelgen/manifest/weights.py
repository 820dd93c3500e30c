"""The key `weights`: the requested layouts of weights, by target and by weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import of_type
from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.values import explain_tensor, parse_tensor

LayoutRequest = tuple[str, frozenset[TensorDesc] | None]
"""A requested layout, and ggml's shape and type of the weights that it applies to; None for all weights that support it."""

Wishes = tuple[LayoutRequest, ...]


class WeightLayouts:
    """The layouts that a manifest requests, or an entry instead of it.

    Args:
        node: the value of `weights`; None if there is none.
        targets: the manifest's targets.
        report: receives mistakes.
    """

    def __init__(self, node: YamlNode | None, targets: Sequence[str], report: Report) -> None:
        self._report = report
        self._named: list[tuple[LayoutRequest, TensorDesc, YamlNode]] = []
        self._used: set[tuple[LayoutRequest, TensorDesc]] = set()
        everywhere = tuple(targets)
        self.by_targets: list[tuple[tuple[str, ...], Wishes]] = [(everywhere, ())]
        """Targets and their requested layouts: one item if all targets have the same."""
        if node is None:
            return
        if node.kind != "map":
            self.by_targets = [(everywhere, self._wishes(node))]
            return
        for name, key in node.keys.items():
            if targets and name not in targets:
                hint = f"its targets are {', '.join(targets)}"
                report.fail(key, f"weights: the manifest is not for {short(name)}", hint)
        requested = {name: self._wishes(item) for name, item in node.value.items()}
        found: list[tuple[list[str], Wishes]] = []
        for target in everywhere:
            wishes = requested.get(target, ())
            same = next((names for names, known in found if known == wishes), None)
            if same is None:
                found.append(([target], wishes))
            else:
                same.append(target)
        self.by_targets = [(tuple(names), wishes) for names, wishes in found] or self.by_targets

    def _wishes(self, node: YamlNode) -> Wishes:
        return tuple(wish for item in node.value for wish in self._of_item(item))

    def _of_item(self, item: YamlNode) -> Iterator[LayoutRequest]:
        if item.kind != "map":
            yield item.text, None
            return
        for layout, listed in item.value.items():
            tensors: dict[TensorDesc, YamlNode] = {}
            for text in listed.value:
                try:
                    tensor = parse_tensor(text.text)
                except ValueError as error:
                    self._report.fail(text, *explain_tensor(text.text, str(error)))
                    continue
                if tensor.layout:
                    self._report.fail(text, f"a weight is named as ggml has it, without :{tensor.layout}")
                elif layout not in of_type(tensor.dtype):
                    there = ", ".join(of_type(tensor.dtype)) or "none"
                    self._report.fail(
                        text, f"{layout} is not a layout of {tensor.type_text}", f"its layouts are {there}"
                    )
                tensors[tensor] = text
            wish = layout, frozenset(tensors)
            self._named += [(wish, tensor, text) for tensor, text in tensors.items()]
            yield wish

    def laid_out(self, tensor: TensorDesc, wishes: Wishes) -> TensorDesc:
        """Returns a weight in the first of some layouts that it supports, or unchanged."""
        supported = of_type(tensor.dtype)
        wish = next((w for w in wishes if w[0] in supported and (w[1] is None or tensor in w[1])), None)
        if wish is None or not tensor.contiguous:
            return tensor
        self._used.add((wish, tensor))
        return tensor.in_layout(wish[0])

    @property
    def names(self) -> tuple[str, ...]:
        """The requested layouts."""
        return tuple(dict.fromkeys(layout for _, wishes in self.by_targets for layout, _ in wishes))

    def check_used(self) -> None:
        """Reports named tensors that are not a weight of any entry."""
        for wish, tensor, node in self._named:
            if (wish, tensor) not in self._used and id(node) not in self._report.wrong:
                hint = "a weight is named by its shape and type, as entries have it"
                self._report.fail(node, f"no entry has a weight {tensor} for the layout {wish[0]}", hint)
