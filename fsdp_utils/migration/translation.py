"""What a config asks for, in FSDP2's terms: settings, the Python to write, and a row for each key."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_utils.migration.values import TranslationError, shown

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# where the rows' sources are
FSDP2 = "https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html"
GUIDE = "https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html"
TITAN = "https://github.com/pytorch/torchtitan/blob/00293cb7d0a8916b1401d694edc6f0002e99fd5c/docs/fsdp.md"
STATE_DICT = "https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html"
HOST = "host"


@dataclass(frozen=True)
class Row:
    """What became of one key.

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
    """What a config asks for, in FSDP2's terms.

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
    def mp_policy(self) -> "MixedPrecisionPolicy":
        """What `fully_shard` is given as mp_policy."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.param_dtype is None or self.reduce_dtype is None:
            return MixedPrecisionPolicy()
        param, reduce = getattr(torch, self.param_dtype), getattr(torch, self.reduce_dtype)
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)

    @property
    def without_counterpart(self) -> list[str]:
        """What FSDP2 does not do, in words."""
        return [
            f"{row.key} = {shown(row.value)}: {row.fsdp2}" for row in self.rows if not row.has_counterpart
        ]

    def code(self) -> str:
        """The Python to write: a function `shard_model(model)`, called before the optimizer is built.

        With tensor parallelism it is `shard_model(model, tp_plan)`: the plan names a style for each layer.
        """
        imports: set[str] = set()
        body = []
        if self.masters and self.param_dtype is not None:
            body = [
                "# model.float() for what is trained: 16-bit weights would round small steps away",
                "for parameter in model.parameters():",
                "    if parameter.requires_grad:",
                "        parameter.data = parameter.data.float()",
            ]
            if self.ddp:  # BatchNorm, for one, takes its statistics in the dtype of its weights alone
                body += [
                    "for module in model.modules():  # and the buffers beside them",
                    "    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):",
                    "        for buffer in module.buffers(recurse=False):",
                    "            if buffer.is_floating_point():",
                    "                buffer.data = buffer.data.float()",
                ]
        body += [] if self.ddp else self._options(imports)
        in_blocks = []
        if self.checkpointing:
            module = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
            imports.add(f"from {module} import checkpoint_wrapper")
            in_blocks += ["block = checkpoint_wrapper(block)", "model.set_submodule(name, block)"]
        if not self.ddp:
            reshard = f"reshard_after_forward={self.reshard_after_forward}"
            in_blocks.append(f"fully_shard(block, {reshard}, **options)")
        if in_blocks and self.blocks != ():
            body += [
                self._names(imports),
                "for name, block in reversed(list(model.named_modules())):  # from the inside out",
                "    if type(block).__name__ in names:",
                *(f"        {line}" for line in in_blocks),
            ]
        if self.ddp:
            imports.add("from torch.nn.parallel import DistributedDataParallel")
            body.append("return DistributedDataParallel(model, gradient_as_bucket_view=True)")
        else:
            body.append("return fully_shard(model, **options)  # the root, with what is left over")
        plain = sorted(line for line in imports if line.startswith("import"))
        others = sorted(imports - set(plain))
        arguments = "model, tp_plan" if self.tensor_parallel > 1 and not self.ddp else "model"
        lines = [*plain, *others, "", "", f"def shard_model({arguments}):", *(f"    {line}" for line in body)]
        return "\n".join(lines) + "\n"

    def _names(self, imports: set[str]) -> str:
        if self.blocks is None:
            imports.add("from fsdp_utils import transformer_block_classes")
            return "names = {kind.__name__ for kind in transformer_block_classes(model)}"
        for name in self.blocks:
            if not name.isidentifier():
                raise TranslationError(f"blocks: expected names of classes, found {shown(name)}")
        names = ", ".join(f'"{name}"' for name in self.blocks)
        return f"names = {{{names}}}"

    def _options(self, imports: set[str]) -> list[str]:
        fsdp, lines = {"fully_shard"}, ["options = {}"]
        if self.shard_size is not None or self.copies not in (None, 1) or self.tensor_parallel > 1:
            lines += self._mesh(imports)
        if self.param_dtype is not None:
            imports.add("import torch")
            fsdp.add("MixedPrecisionPolicy")
            dtypes = f"param_dtype=torch.{self.param_dtype}, reduce_dtype=torch.{self.reduce_dtype}"
            lines.append(f'options["mp_policy"] = MixedPrecisionPolicy({dtypes})')
            if self.param_dtype == "float16":
                lines.append("# fp16: the training loop scales the loss with torch.amp.GradScaler")
        if self.offload:
            fsdp.add("CPUOffloadPolicy")
            pinned = "" if self.pin_memory else "pin_memory=False"
            lines.append(f'options["offload_policy"] = CPUOffloadPolicy({pinned})')
        imports.add(f"from torch.distributed.fsdp import {', '.join(sorted(fsdp))}")
        return lines

    def _mesh(self, imports: set[str]) -> list[str]:
        imports |= {"import torch", "import torch.distributed as dist"}
        imports.add("from torch.distributed.device_mesh import init_device_mesh")
        tp, lines, ranks = self.tensor_parallel, [], "dist.get_world_size()"
        if tp > 1:
            lines.append(f"tp = {tp}  # ranks that share each layer")
            ranks = f"{ranks} // tp"
        size = f"size = {self.shard_size}  # ranks that share one copy"
        if self.shard_size == HOST:
            imports.add("import os")
            size = 'size = int(os.environ["LOCAL_WORLD_SIZE"])  # the ranks of a host; torchrun sets it'
        elif self.shard_size is None:
            part = f" // {self.copies}" if self.copies not in (None, 1) else ""
            size = f"size = {ranks}{part}  # ranks that share one copy"
        lines.append(size)
        if self.copies is not None and isinstance(self.shard_size, int):
            total = self.copies * self.shard_size * tp
            lines.append(f"assert dist.get_world_size() == {total}  # what the config's sizes make")
        shape, dims = ["size"], ['"shard"']
        if self.copies not in (None, 1) or (self.copies is None and self.shard_size is not None):
            shape, dims = [f"{ranks} // size", "size"], ['"replicate"', '"shard"']
        sharded = ", ".join(dims)
        if tp > 1:
            shape, dims = [*shape, "tp"], [*dims, '"tp"']
        lines += [
            f"shape = ({', '.join(shape)})",
            f"dims = ({', '.join(dims)})",
            'device_type = "cuda" if torch.cuda.is_available() else "cpu"',
        ]
        mesh = "init_device_mesh(device_type, shape, mesh_dim_names=dims)"
        if tp == 1:
            return [*lines, f'options["mesh"] = {mesh}']
        imports.add("from torch.distributed.tensor.parallel import parallelize_module")
        return [
            *lines,
            f"mesh = {mesh}",
            'parallelize_module(model, mesh["tp"], tp_plan)',
            f'options["mesh"] = mesh[{sharded}]',
        ]

    def __str__(self) -> str:
        width = max((len(row.key) for row in self.rows), default=0)
        lines = [f"{self.framework} to FSDP2"]
        for row in self.rows:
            mark = " " if row.has_counterpart else "!"
            lines.append(f"{mark} {row.key:{width}} = {shown(row.value)}\n      {row.fsdp2}")
        if self.without_counterpart:
            lines.append("(! has no counterpart in FSDP2)")
        return "\n".join(lines)
