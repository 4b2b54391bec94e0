"""`longspan explain`: what a run file means."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan.cli.groups import headline
from longspan.cli.output import Json, console, print_json, table
from longspan.cli.overrides import Override, parse_overrides
from longspan.errors import ConfigError
from longspan.spec.layout import Layout
from longspan.spec.model import ModelSpec
from longspan.spec.ownership import ModuleShards, ownership
from longspan.spec.run import RunConfig, known_keys

LAYER = "layers.*."


def layout(run: Path, /, *overrides: Override, json: Json = False) -> None:
    """Show for every module which shard of the sequence and of the weights a rank holds under tp, sp and cp.

    Args:
        run: The run file.
        overrides: As for every verb.
        json: As for every verb.
    """
    config = RunConfig.load(run, parse_overrides(overrides))
    spec = config.model_spec()
    modules = ownership(config.layout, spec)
    tokens = max(stage.tokens_at_once for stage in config.stage_plan.stages)
    notes = list(_notes(config.layout, spec, tokens))
    if json:
        print_json(
            {
                "layout": asdict(config.layout),
                "modules": [asdict(module) for module in modules],
                "notes": notes,
            }
        )
    else:
        _show(config.layout, modules, notes, console())


def config(section: str = "", /, *, json: Json = False) -> None:
    """Show the keys of a run file: what they may be, what they are when left out, what they mean.

    Args:
        section: Only the keys of this section, as in `layout` or `model.rope`.
        json: As for every verb.
    """
    keys = {key: leaf for key, leaf in known_keys().items() if key.startswith(f"{section}.") or not section}
    if not keys:
        sections = list(dict.fromkeys(key.partition(".")[0] for key in known_keys()))
        raise ConfigError(f"no section {section!r}; use one of {', '.join(sections)}")
    if json:
        print_json(keys)
        return
    rows = table("key", "may be", "left out", "meaning")
    for key, leaf in keys.items():
        left_out = leaf.get("default")
        # Plain text, because [brackets] in it are no markup.
        meaning = Text(leaf.get("description", ""))
        rows.add_row(key, _choices(leaf), "–" if left_out is None else _toml(left_out), meaning)
    console().print(rows)


def _choices(leaf: dict[str, Any]) -> str:
    options = [option for option in leaf.get("anyOf", [leaf]) if option.get("type") != "null"]
    return " | ".join(
        " | ".join(option["enum"]) if "enum" in option else option.get("type", "value") for option in options
    )


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _show(layout: Layout, modules: tuple[ModuleShards, ...], notes: list[str], out: Console) -> None:
    out.print(headline(layout), "", _module_table(layout, modules), sep="\n")
    for note in notes:
        out.print("", note, sep="\n")


def _module_table(layout: Layout, modules: tuple[ModuleShards, ...]) -> Table:
    names = ("module", "tokens in", "tokens out", "tp splits", "weight on a rank", "gradient sum")
    columns = table(*names, uncut=4)
    inside = False
    for module in modules:
        if module.module.startswith(LAYER) and not inside:
            columns.add_row("every layer")
        inside = module.module.startswith(LAYER)
        columns.add_row(
            f"  {module.module.removeprefix(LAYER)}" if inside else module.module,
            _tokens(layout, module.input_tokens),
            _tokens(layout, module.output_tokens),
            module.split or "–",
            _weight(layout, module),
            " × ".join(module.gradient_sum) or "–",
        )
    return columns


def _tokens(layout: Layout, axes: tuple[str, ...]) -> str:
    """The share of the tokens, named by the technique: on the tp axis it is sp that deals tokens out."""
    names = "·".join("sp" if axis == "tp" else axis for axis in axes)
    return f"1/{math.prod(map(layout.size, axes))} {names}" if axes else "all"


def _weight(layout: Layout, module: ModuleShards) -> str:
    if module.weight_shape is None:
        return "–"
    shape = "×".join(map(str, module.weight_shape))
    held = f"whole {shape}"
    if module.weight_dim is not None:
        held = f"{'columns' if module.weight_dim else 'rows'} 1/{layout.tp} of {shape}"
    if not module.weight_axes:
        return held
    return (
        f"{held}; between uses 1/{layout.weight_shards} of its {'columns' if module.shared_dim else 'rows'}"
    )


def _notes(layout: Layout, spec: ModelSpec, tokens: int) -> Iterator[str]:
    on_cp = -(-tokens // layout.cp)
    on_stream = -(-on_cp // layout.tp) if layout.sp else on_cp
    yield (
        f"cp and sp are different things. Context parallelism (here cp={layout.cp}) deals out the input, and "
        f"with it every activation: a rank gets at most {on_cp} of {tokens} tokens, and attention exchanges "
        f"keys and values over cp. Sequence parallelism (here {'on' if layout.sp else 'off'}) deals out, "
        "inside a tp group only, the activations that tp would copy, and gathers them before every split "
        f"weight: between those a rank holds at most {on_stream} tokens, and attention sees all tokens of "
        "its cp rank."
    )
    if spec.num_kv_heads < layout.tp:
        yield (
            f"tp={layout.tp} exceeds the {spec.num_kv_heads} key/value heads: every rank holds k_proj and "
            f"v_proj whole and uses one head. {layout.tp // spec.num_kv_heads} ranks use the same head, so "
            "that the gradients are summed over tp."
        )
