"""The settings that a config asks for, in FSDP2's terms, and the code that makes them."""

from dataclasses import dataclass, field
from typing import Any

MOST_SHOWN = 400  # characters of a value in a message
MASTERS = [
    "# model.float() for what is trained: 16-bit weights would round small steps away",
    "for parameter in model.parameters():",
    "    if parameter.requires_grad:",
    "        parameter.data = parameter.data.float()",
]
WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
# the import that a program needs where it uses a name
IMPORTS = {
    "os.environ": "import os",
    "torch.": "import torch",
    "dist.": "import torch.distributed as dist",
    "transformer_block_classes": "from fsdp_utils import transformer_block_classes",
    "checkpoint_wrapper": f"from {WRAPPER} import checkpoint_wrapper",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "parallelize_module": "from torch.distributed.tensor.parallel import parallelize_module",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
}


class TranslationError(ValueError):
    """A config that cannot be translated: names the key, what was expected and what was found.

    Example::

        try:
            translate({"zero_optimization": {"stage": 4}})
        except TranslationError as error:
            print(error)  # zero_optimization.stage: expected one of 0, 1, 2, 3, found 4
    """


def shown(value: Any) -> str:
    """Quote a value of a config for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


@dataclass(frozen=True)
class Row:
    """The counterpart of one key.

    Args:
        key: its name, with the sections that it stands in: "fsdp_config.fsdp_offload_params".
        value: what the config gives it.
        fsdp2: what to write instead, or why there is nothing to write.
        has_counterpart: False where FSDP2 has nothing that does the same.
        source: where it is documented.
    """

    key: str
    value: Any
    fsdp2: str
    has_counterpart: bool
    source: str


@dataclass
class Translation:
    """The settings that a config asks for, in FSDP2's terms.

    Args:
        framework: whose config it was.
        ddp: True where nothing is sharded: FSDP2 has no setting for that, DDP does it.
        reshard_after_forward: of every unit but the root, which keeps torch's default.
        shard_size: how many ranks share one copy of the model: None for all of them, "host" for those of a
            host, else a number. Other than None it takes a 2-D mesh.
        copies: how many copies of the model there are, if that is what the config says; else None.
        tensor_parallel: how many ranks share each layer; above 1 `shard_model` takes a plan for
            `parallelize_module`.
        param_dtype, reduce_dtype: of the mixed precision, such as "bfloat16"; both None without one.
        masters: whether the old program updates float32 weights under mixed precision, whatever dtype the
            model has. The code then makes each parameter that requires a gradient float32.
        offload: whether parameters, gradients and optimizer state lie in host memory.
        pin_memory: of the offloading.
        blocks: class names of the modules that become units; None for the transformer blocks, as
            `transformer_block_classes` finds them; empty for the root alone.
        checkpointing: whether each unit's activations are computed again in backward.
        state_dict: "full" for one file, "sharded" for one per rank.
        rows: what became of each key.
    """

    framework: str
    ddp: bool = False
    reshard_after_forward: bool | int = True
    shard_size: int | str | None = None
    copies: int | None = None
    tensor_parallel: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    masters: bool = False
    offload: bool = False
    pin_memory: bool = True
    blocks: tuple[str, ...] | None = None
    checkpointing: bool = False
    state_dict: str = "sharded"
    rows: list[Row] = field(default_factory=list)

    @property
    def without_counterpart(self) -> list[str]:
        """List in words what FSDP2 does not do."""
        lost = (row for row in self.rows if not row.has_counterpart)
        return [f"{row.key} = {shown(row.value)}: {row.fsdp2}" for row in lost]

    def code(self) -> str:
        """Write the Python: a function `shard_model(model)`, to be called before the optimizer is built.

        With tensor parallelism it is `shard_model(model, tp_plan)`: the plan names a style for each layer.
        """
        masters = self.masters and self.param_dtype is not None
        if self.ddp:
            last = "return DistributedDataParallel(model, gradient_as_bucket_view=True)"
            body = ["model.float()  # 16-bit weights would round small steps away"] if masters else []
            body += [*self._units(), last]
        else:
            last = "return fully_shard(model, **options)  # the root, with what is left over"
            body = [*(MASTERS if masters else []), *self._options(), *self._units(), last]
        text = "\n".join(f"    {line}" for line in body)
        imports = [line for name, line in IMPORTS.items() if name in text]
        if not self.ddp:
            of_fsdp = ("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard")
            names = ", ".join(name for name in of_fsdp if name in text)
            imports.append(f"from torch.distributed.fsdp import {names}")
        imports.sort(key=lambda line: (line.startswith("from"), line))
        arguments = "model, tp_plan" if self.tensor_parallel > 1 and not self.ddp else "model"
        return "\n".join([*imports, "", "", f"def shard_model({arguments}):", text]) + "\n"

    def _units(self) -> list[str]:
        lines = []
        if self.checkpointing:
            lines += ["block = checkpoint_wrapper(block)", "model.set_submodule(name, block)"]
        if not self.ddp:
            reshard = f"reshard_after_forward={self.reshard_after_forward}"
            lines.append(f"fully_shard(block, {reshard}, **options)")
        if not lines or self.blocks == ():
            return []
        names = "{kind.__name__ for kind in transformer_block_classes(model)}"
        if self.blocks is not None:
            if not all(name.isidentifier() for name in self.blocks):
                raise TranslationError(f"blocks: expected names of classes, found {shown(self.blocks)}")
            names = "{" + ", ".join(f'"{name}"' for name in self.blocks) + "}"
        return [
            f"names = {names}",
            "for name, block in reversed(list(model.named_modules())):  # from the inside out",
            "    if type(block).__name__ in names:",
            *(f"        {line}" for line in lines),
        ]

    def _options(self) -> list[str]:
        lines = ["options = {}"]
        if self.shard_size is not None or self.copies not in (None, 1) or self.tensor_parallel > 1:
            lines += self._mesh()
        if self.param_dtype is not None:
            dtypes = f"param_dtype=torch.{self.param_dtype}, reduce_dtype=torch.{self.reduce_dtype}"
            lines.append(f'options["mp_policy"] = MixedPrecisionPolicy({dtypes})')
        if self.param_dtype == "float16":
            lines.append("# fp16: the training loop scales the loss with torch.amp.GradScaler")
        if self.offload:
            pinned = "" if self.pin_memory else "pin_memory=False"
            lines.append(f'options["offload_policy"] = CPUOffloadPolicy({pinned})')
        return lines

    def _mesh(self) -> list[str]:
        tp, size, copies = self.tensor_parallel, self.shard_size, self.copies
        ranks = "dist.get_world_size() // tp" if tp > 1 else "dist.get_world_size()"
        part = f" // {copies}" if copies not in (None, 1) else ""
        host = 'int(os.environ["LOCAL_WORLD_SIZE"])  # the ranks of a host; torchrun sets it'
        shared = f"{ranks + part if size is None else size}  # ranks that share one copy"
        with_copies = copies not in (None, 1) or (copies is None and size is not None)
        dims = '"replicate", "shard"' if with_copies else '"shard"'
        lines = [f"tp = {tp}  # ranks that share each layer"] if tp > 1 else []
        lines.append(f"size = {host if size == 'host' else shared}")
        if copies is not None and isinstance(size, int):
            lines.append(
                f"assert dist.get_world_size() == {copies * size * tp}  # what the config's sizes make"
            )
        lines += [
            f"shape = ({f'{ranks} // size, ' if with_copies else ''}size{', tp' if tp > 1 else ''})",
            "dims = (" + dims + (', "tp"' if tp > 1 else "") + ")",
            'device_type = "cuda" if torch.cuda.is_available() else "cpu"',
        ]
        mesh = "init_device_mesh(device_type, shape, mesh_dim_names=dims)"
        if tp == 1:
            return [*lines, f'options["mesh"] = {mesh}']
        lines += [f"mesh = {mesh}", 'parallelize_module(model, mesh["tp"], tp_plan)']
        return [*lines, f'options["mesh"] = mesh[{dims}]']

    def __str__(self) -> str:
        width = max((len(row.key) for row in self.rows), default=0)
        lines = [f"{self.framework} to FSDP2"]
        for row in self.rows:
            mark = " " if row.has_counterpart else "!"
            lines.append(f"{mark} {row.key:{width}} = {shown(row.value)}\n      {row.fsdp2}")
        if self.without_counterpart:
            lines.append("(! has no counterpart in FSDP2)")
        return "\n".join(lines)
