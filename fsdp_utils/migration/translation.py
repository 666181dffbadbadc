"""The settings that a config asks for, in FSDP2's terms, and the code that makes them."""

from dataclasses import dataclass, field
from typing import Any

MOST_SHOWN = 400  # characters of a value in a message
HOST = 'int(os.environ["LOCAL_WORLD_SIZE"])  # the ranks of a host; torchrun sets it'
WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
OF_FSDP = ("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard")
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
    """The counterpart of one key."""

    key: str  #: with the sections that it stands in: "fsdp_config.fsdp_offload_params"
    value: Any  #: as the config has it
    fsdp2: str  #: what to write instead, or why there is nothing to write
    has_counterpart: bool  #: False where FSDP2 has nothing that does the same
    source: str  #: where it is documented


@dataclass
class Translation:
    """The settings that a config asks for, in FSDP2's terms."""

    framework: str  #: whose config it was
    ddp: bool = False  #: True where nothing is sharded: DistributedDataParallel does that
    reshard_after_forward: bool | int = True  #: of every unit but the root, which keeps torch's default
    shard_size: int | str | None = None  #: ranks that share a copy: None for all, "host" for those of a host
    copies: int | None = None  #: of the model; None where the config does not say
    tensor_parallel: int = 1  #: how many ranks share each layer
    param_dtype: str | None = None  #: of the mixed precision, such as "bfloat16"; None without one
    reduce_dtype: str | None = None  #: the same, for the reduction of gradients
    masters: bool = False  #: whether mixed precision updates float32 weights; the code then makes them so
    offload: bool = False  #: whether parameters, gradients and optimizer state lie in host memory
    pin_memory: bool = True  #: of the offloading
    blocks: tuple[str, ...] | None = None  #: classes of units; None: transformer blocks; (): the root alone
    checkpointing: bool = False  #: whether each unit's activations are computed again in backward
    state_dict: str = "sharded"  #: "full" for one file, "sharded" for one per rank
    rows: list[Row] = field(default_factory=list)  #: what became of each key

    @property
    def without_counterpart(self) -> list[str]:
        """List in words what FSDP2 does not do."""
        lost = (row for row in self.rows if not row.has_counterpart)
        return [f"{row.key} = {shown(row.value)}: {row.fsdp2}" for row in lost]

    def code(self) -> str:
        """Write the Python: a function `shard_model(model)`, to be called before the optimizer is built.

        With tensor parallelism it is `shard_model(model, tp_plan)`: the plan names a style for each layer.
        """
        sharded, dtype, tp = not self.ddp, self.param_dtype, self.tensor_parallel
        masters, low = self.masters and dtype is not None, sharded and dtype is not None
        cast, scaled = masters and sharded, sharded and dtype == "float16"
        meshed = sharded and (self.shard_size is not None or self.copies not in (None, 1) or tp > 1)
        split, size, copies = meshed and tp > 1, self.shard_size, self.copies
        ranks = "dist.get_world_size() // tp" if split else "dist.get_world_size()"
        replicated = size is not None if copies is None else copies != 1
        shape = ", ".join([f"{ranks} // size"] * replicated + ["size"] + ["tp"] * split)
        dims = ", ".join(['"replicate"'] * replicated + ['"shard"'])
        dtypes = f"param_dtype=torch.{dtype}, reduce_dtype=torch.{self.reduce_dtype}"
        reshard = f"reshard_after_forward={self.reshard_after_forward}"
        mesh = "init_device_mesh(device_type, shape, mesh_dim_names=dims)"
        product = copies * size * tp if sharded and copies is not None and isinstance(size, int) else 0
        if size is None:
            size = ranks if copies in (None, 1) else f"{ranks} // {copies}"
        size = HOST if size == "host" else f"{size}  # ranks that share one copy"
        units = self.blocks != () and (sharded or self.checkpointing)
        recompute, pinned = units and self.checkpointing, "" if self.pin_memory else "pin_memory=False"
        names = "{kind.__name__ for kind in transformer_block_classes(model)}"
        if self.blocks is not None:
            names = "{" + ", ".join(f'"{name}"' for name in self.blocks) + "}"
        lines = [  # whether it is needed, and the line
            (masters and self.ddp, "model.float()  # 16-bit weights would round small steps away"),
            (cast, "# model.float() for what is trained: 16-bit weights would round small steps away"),
            (cast, "for parameter in model.parameters():"),
            (cast, "    if parameter.requires_grad:"),
            (cast, "        parameter.data = parameter.data.float()"),
            (sharded, "options = {}"),
            (split, f"tp = {tp}  # ranks that share each layer"),
            (meshed, f"size = {size}"),
            (product, f"assert dist.get_world_size() == {product}  # what the config's sizes make"),
            (meshed, f"shape = ({shape})"),
            (meshed, f"dims = ({dims}" + ', "tp"' * split + ")"),
            (meshed, 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'),
            (split, f"mesh = {mesh}"),
            (split, 'parallelize_module(model, mesh["tp"], tp_plan)'),
            (split, f'options["mesh"] = mesh[{dims}]'),
            (meshed and not split, f'options["mesh"] = {mesh}'),
            (low, f'options["mp_policy"] = MixedPrecisionPolicy({dtypes})'),
            (scaled, "# fp16: the training loop scales the loss with torch.amp.GradScaler"),
            (sharded and self.offload, f'options["offload_policy"] = CPUOffloadPolicy({pinned})'),
            (units, f"names = {names}"),
            (units, "for name, block in reversed(list(model.named_modules())):  # from the inside out"),
            (units, "    if type(block).__name__ in names:"),
            (recompute, "        block = checkpoint_wrapper(block)"),
            (recompute, "        model.set_submodule(name, block)"),
            (units and sharded, f"        fully_shard(block, {reshard}, **options)"),
            (sharded, "return fully_shard(model, **options)  # the root, with what is left over"),
            (self.ddp, "return DistributedDataParallel(model, gradient_as_bucket_view=True)"),
        ]
        text = "\n".join(f"    {line}" for needed, line in lines if needed)
        imports = [line for name, line in IMPORTS.items() if name in text]
        if of_fsdp := [name for name in OF_FSDP if name in text]:
            imports.append(f"from torch.distributed.fsdp import {', '.join(of_fsdp)}")
        imports.sort(key=lambda line: (line.startswith("from"), line))
        return "\n".join([*imports, "", "", f"def shard_model(model{', tp_plan' * split}):", text]) + "\n"

    def __str__(self) -> str:
        width = max((len(row.key) for row in self.rows), default=0)
        lines = [f"{self.framework} to FSDP2"]
        for row in self.rows:
            mark = " " if row.has_counterpart else "!"
            lines += [f"{mark} {row.key:{width}} = {shown(row.value)}", f"      {row.fsdp2}"]
        lines += ["(! has no counterpart in FSDP2)"] if self.without_counterpart else []
        return "\n".join(lines)
