"""What the network is: `ModelConfig`, read from a Hugging Face `config.json` or from a preset.

Source of fields, defaults and sizes: transformers 5.17 `Gemma4TextConfig` and the published
config files.
"""

import dataclasses
import json
import logging
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gemma_jax.errors import ConfigError

logger = logging.getLogger(__name__)

LayerKind = Literal["sliding_attention", "full_attention"]
SLIDING: LayerKind = "sliding_attention"
FULL: LayerKind = "full_attention"

TEXT_MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")
MODEL_TYPES = ("gemma4", "gemma4_unified", *TEXT_MODEL_TYPES)
ROPE_TYPES = ("default", "proportional")


MAX_SIZE, MAX_LAYERS = 2**31 - 1, 1024


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _check_int(name: str, value: Any, minimum: int, maximum: int = MAX_SIZE) -> None:
    if not _is_int(value) or not minimum <= value <= maximum:
        shown = value if not _is_int(value) or abs(value) < 10**30 else f"{str(value)[:9]}…"
        raise ConfigError(f"{name}={shown!r}: expected an integer from {minimum} to {maximum}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer kind.

    `partial_rotary_factor` is the rotated share of the channels of a proportional RoPE; the default
    kind rotates all of them. `factor` divides the frequencies.
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self):
        _check_choice("rope_type", self.rope_type, ROPE_TYPES)
        for name in ("rope_theta", "factor"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"{name}={value!r}: expected a finite number above 0")
        share = self.partial_rotary_factor
        if not (_is_number(share) and 0 < share <= 1):
            raise ConfigError(f"partial_rotary_factor={share!r}: expected a number in (0, 1]")


SLIDING_ROPE = RopeConfig("default", 10_000.0)
FULL_ROPE = RopeConfig("proportional", 1_000_000.0, partial_rotary_factor=0.25)


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and wiring of one decoder layer, derived from `ModelConfig`.

    `kv_source` is the layer whose K and V this layer attends to; its own index for an owner layer.
    """

    index: int
    kind: LayerKind
    num_kv_heads: int
    num_groups: int
    head_dim: int
    intermediate_size: int
    kv_source: int
    k_eq_v: bool
    rope: RopeConfig
    window: int | None

    @property
    def owns_kv(self) -> bool:
        """True when the layer computes and stores its own K and V."""
        return self.kv_source == self.index

    @property
    def is_sliding(self) -> bool:
        return self.kind == SLIDING


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of a Gemma 4 text decoder, with the field names of the published config."""

    vocab_size: int = 262_144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    layer_types: tuple[LayerKind, ...] = ()
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_global_key_value_heads: int | None = None
    head_dim: int = 256
    global_head_dim: int = 512
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    sliding_window: int = 512
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262_144
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = None
    max_position_embeddings: int = 131_072
    sliding_rope: RopeConfig = SLIDING_ROPE
    full_rope: RopeConfig = FULL_ROPE
    use_bidirectional_attention: str | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    model_type: str = "gemma4_text"
    ignored_fields: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self):
        _check_int("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS)
        if not self.layer_types:
            pattern = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(self.num_hidden_layers)]
            object.__setattr__(self, "layer_types", tuple(pattern))
        if self.layer_types and self.layer_types[-1] == SLIDING:
            # transformers forces the last layer to full attention.
            object.__setattr__(self, "layer_types", (*self.layer_types[:-1], FULL))
        _validate(self)

    # --- derived ---------------------------------------------------------------------------------

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer without K and V of its own, or the number of layers."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def has_per_layer_inputs(self) -> bool:
        return self.hidden_size_per_layer_input > 0

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """One `LayerConfig` a decoder layer."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    @property
    def owner_layers(self) -> tuple[LayerConfig, ...]:
        return self.layers[: self.first_shared_layer]

    def _layer(self, index: int) -> LayerConfig:
        kind = self.layer_types[index]
        full = kind == FULL
        shared = index >= self.first_shared_layer
        k_eq_v = full and self.attention_k_eq_v
        num_kv_heads = self.num_key_value_heads
        if k_eq_v and self.num_global_key_value_heads is not None:
            num_kv_heads = self.num_global_key_value_heads
        return LayerConfig(
            index=index,
            kind=kind,
            num_kv_heads=num_kv_heads,
            num_groups=self.num_attention_heads // num_kv_heads,
            head_dim=self.global_head_dim if full else self.head_dim,
            intermediate_size=self.intermediate_size
            * (2 if shared and self.use_double_wide_mlp else 1),
            kv_source=self._donor(kind) if shared else index,
            k_eq_v=k_eq_v,
            rope=self.full_rope if full else self.sliding_rope,
            window=None if full else self.sliding_window,
        )

    def _donor(self, kind: LayerKind) -> int:
        owners = self.layer_types[: self.first_shared_layer]
        return max(i for i, owner_kind in enumerate(owners) if owner_kind == kind)

    # --- construction ----------------------------------------------------------------------------

    def context_length(self, max_model_len: int | None) -> int:
        """Most tokens of a sequence: `max_model_len`, or what the model was built for.

        Raises:
          ConfigError: `max_model_len` exceeds what the model was built for.
        """
        limit = self.max_position_embeddings
        if max_model_len is None:
            return limit
        _check_int("max_model_len", max_model_len, 2)
        if max_model_len > limit:
            raise ConfigError(
                f"max_model_len={max_model_len}: at most max_position_embeddings={limit}"
            )
        return max_model_len

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed and everything checked again."""
        unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise ConfigError(f"unknown ModelConfig field(s) {sorted(unknown)}")
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_preset(cls, name: str) -> "ModelConfig":
        """The configuration of a published size: e2b, e4b, 12b, 26b-a4b or 31b."""
        _check_choice("preset", name, tuple(PRESETS))
        return PRESETS[name]

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` at `path` (the file, or the directory that holds it)."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; a checkpoint needs its config.json") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error})") from None
        return cls.from_hf(data)

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> "ModelConfig":
        """Reads the dictionary of a Hugging Face `config.json`, nested or top-level.

        Raises:
          ConfigError: an unknown model type, a value of the wrong type or range, or two fields that
            contradict each other; the message names the field.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"config: expected a JSON object, got {type(data).__name__}")
        model_type = data.get("model_type")
        _check_choice("model_type", model_type, MODEL_TYPES)
        if data.get("quantization_config") is not None:
            raise ConfigError(
                "quantization_config: quantized checkpoints are not supported; use bf16"
            )
        text = data
        if "text_config" in data:
            text = data["text_config"]
            if not isinstance(text, dict):
                raise ConfigError(f"text_config={text!r}: expected a JSON object")
            inner = text.get("model_type", "gemma4_text")
            _check_choice("text_config.model_type", inner, TEXT_MODEL_TYPES)
            if text.get("quantization_config") is not None:
                raise ConfigError(
                    "text_config.quantization_config: quantized checkpoints are not supported"
                )
        elif model_type not in TEXT_MODEL_TYPES:
            raise ConfigError(f"text_config: missing; model_type={model_type!r} needs it")
        return cls(**_hf_fields(text, data))

    def to_hf(self) -> dict[str, Any]:
        """The dictionary of a text-only `config.json` (`Gemma4ForCausalLM`, `gemma4_text`)."""
        skip = (
            "sliding_rope",
            "full_rope",
            "ignored_fields",
            "layer_types",
            "eos_token_id",
            "model_type",
        )
        out = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skip
        }
        eos = self.eos_token_id
        return {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            **out,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "layer_types": list(self.layer_types),
            "rope_parameters": {
                SLIDING: _rope_to_hf(self.sliding_rope),
                FULL: _rope_to_hf(self.full_rope),
            },
        }


# --- reading ----------------------------------------------------------------------------------


def _hf_fields(text: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    known -= {"sliding_rope", "full_rope", "ignored_fields"}
    fields = {name: value for name, value in text.items() if name in known}
    nullable = _NULLABLE | {"layer_types"}
    for name in [n for n, v in fields.items() if v is None and n not in nullable]:
        del fields[name]  # null means the default, as in transformers
    if "dtype" not in fields:
        legacy = text.get("torch_dtype") or top.get("dtype") or top.get("torch_dtype")
        if legacy is not None:
            fields["dtype"] = legacy
    layer_types = fields.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list | tuple):
        raise ConfigError(f"layer_types={layer_types!r}: expected a list")
    fields["layer_types"] = tuple(layer_types or ())
    if isinstance(fields.get("eos_token_id"), list):
        fields["eos_token_id"] = tuple(fields["eos_token_id"])
    ropes = text.get("rope_parameters")
    if ropes is not None:
        fields |= _ropes_from_hf(ropes)
    overrides = text.get("per_layer_config")
    if overrides is not None:
        fields |= _global_heads_from_hf(overrides, fields)
    ignored = sorted(
        set(text) - known - {"rope_parameters", "per_layer_config"} - _NOT_ARCHITECTURE
    )
    if ignored:
        logger.info("config fields with no effect on the text decoder: %s", ", ".join(ignored))
    return fields | {"ignored_fields": tuple(ignored)}


def _ropes_from_hf(ropes: Any) -> dict[str, RopeConfig]:
    if not isinstance(ropes, dict):
        raise ConfigError(
            f"rope_parameters={ropes!r}: expected an object with one entry a layer kind"
        )
    unknown = set(ropes) - {SLIDING, FULL}
    if unknown:
        raise ConfigError(
            f"rope_parameters: unknown key(s) {sorted(unknown)}; expected {SLIDING!r} and {FULL!r}"
        )
    out = {}
    for name, kind in (("sliding_rope", SLIDING), ("full_rope", FULL)):
        entry = ropes.get(kind)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ConfigError(f"rope_parameters.{kind}={entry!r}: expected an object")
        allowed = {f.name for f in dataclasses.fields(RopeConfig)}
        extra = {k for k in set(entry) - allowed if entry[k] is not None}
        if extra:
            raise ConfigError(
                f"rope_parameters.{kind}: unknown field(s) {sorted(extra)};"
                f" allowed: {sorted(allowed)}"
            )
        try:
            out[name] = RopeConfig(
                **{k: v for k, v in entry.items() if v is not None and k in allowed}
            )
        except ConfigError as error:
            raise ConfigError(f"rope_parameters.{kind}.{error}") from None
    return out


def _global_heads_from_hf(overrides: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The full-attention head sizes from `per_layer_config`, as transformers 5.17 saves them.

    It maps the index of each full-attention layer to the same overrides of head_dim and
    num_key_value_heads.
    """
    if not isinstance(overrides, dict) or not all(isinstance(o, dict) for o in overrides.values()):
        raise ConfigError(f"per_layer_config={overrides!r}: expected {{layer index: overrides}}")
    layer_types = fields["layer_types"] or ModelConfig(**fields).layer_types
    full = {i for i, kind in enumerate(layer_types) if kind == FULL} | {len(layer_types) - 1}
    values = list(overrides.values())
    same = all(o == values[0] for o in values)
    if {str(i) for i in full} != {str(i) for i in overrides} or not same:
        raise ConfigError(
            f"per_layer_config: expected the same overrides for the full-attention layers"
            f" {sorted(full)} and no others, got {overrides!r}"
        )
    unknown = set(values[0]) - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise ConfigError(
            f"per_layer_config: unsupported override(s) {sorted(unknown)};"
            " allowed: head_dim, num_key_value_heads"
        )
    if "num_key_value_heads" in values[0] and not fields.get("attention_k_eq_v", False):
        raise ConfigError("per_layer_config.num_key_value_heads: needs attention_k_eq_v=true")
    heads = {
        "global_head_dim": values[0].get("head_dim", fields.get("head_dim", 256)),
        "num_global_key_value_heads": values[0].get("num_key_value_heads"),
    }
    for name, value in heads.items():
        if fields.get(name, value) != value:
            raise ConfigError(f"{name}={fields[name]!r}: per_layer_config says {value!r}")
    return heads


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta}
    if rope.rope_type == "proportional":
        out["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.factor != 1.0:
        out["factor"] = rope.factor
    return out


# --- checks -----------------------------------------------------------------------------------

_NULLABLE = {
    "num_global_key_value_heads", "num_experts", "top_k_experts", "moe_intermediate_size",
    "final_logit_softcapping", "use_bidirectional_attention", "pad_token_id", "bos_token_id",
    "eos_token_id",
}  # fmt: skip
_NOT_ARCHITECTURE = {
    "architectures", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "quantization_config",
}  # fmt: skip
_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window",
    "max_position_embeddings",
)  # fmt: skip
_BOOLS = (
    "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "attention_bias",
    "tie_word_embeddings",
)  # fmt: skip


def _validate(c: ModelConfig) -> None:
    _check_choice("model_type", c.model_type, TEXT_MODEL_TYPES)
    for name in _POSITIVE:
        _check_int(name, getattr(c, name), 1)
    _check_int("num_kv_shared_layers", c.num_kv_shared_layers, 0)
    _check_int("hidden_size_per_layer_input", c.hidden_size_per_layer_input, 0)
    for name in _BOOLS:
        _check_choice(name, getattr(c, name), (True, False))
    _check_choice("hidden_activation", c.hidden_activation, ("gelu_pytorch_tanh",))
    _check_choice("attention_bias", c.attention_bias, (False,))
    _check_choice("tie_word_embeddings", c.tie_word_embeddings, (True,))
    _check_choice("attention_dropout", c.attention_dropout, (0, 0.0))
    _check_choice("use_bidirectional_attention", c.use_bidirectional_attention, (None, "vision"))
    _check_choice("dtype", c.dtype, ("bfloat16", "float16", "float32"))
    if not (_is_number(c.rms_norm_eps) and 0 < c.rms_norm_eps < 1):
        raise ConfigError(f"rms_norm_eps={c.rms_norm_eps!r}: expected a number in (0, 1)")
    cap = c.final_logit_softcapping
    if cap is not None and not (_is_number(cap) and 0 < cap < math.inf):
        raise ConfigError(f"final_logit_softcapping={cap!r}: expected null or a number above 0")
    _validate_layers(c)
    _validate_heads(c)
    _validate_experts(c)
    _validate_tokens(c)
    if c.has_per_layer_inputs:
        _check_int("vocab_size_per_layer_input", c.vocab_size_per_layer_input, c.vocab_size)


def _validate_layers(c: ModelConfig) -> None:
    for i, kind in enumerate(c.layer_types):
        _check_choice(f"layer_types[{i}]", kind, (SLIDING, FULL))
    if len(c.layer_types) != c.num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(c.layer_types)} entries,"
            f" but num_hidden_layers={c.num_hidden_layers}"
        )
    if c.num_kv_shared_layers >= c.num_hidden_layers:
        raise ConfigError(
            f"num_kv_shared_layers={c.num_kv_shared_layers}: must be below"
            f" num_hidden_layers={c.num_hidden_layers}"
        )
    owners = set(c.layer_types[: c.first_shared_layer])
    for kind in sorted(set(c.layer_types[c.first_shared_layer :]) - owners):
        raise ConfigError(
            f"num_kv_shared_layers={c.num_kv_shared_layers}: leaves no {kind} layer to share"
            f" K and V from (layer_types[:{c.first_shared_layer}])"
        )


def _validate_heads(c: ModelConfig) -> None:
    if c.num_global_key_value_heads is not None:
        _check_int("num_global_key_value_heads", c.num_global_key_value_heads, 1)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        value = getattr(c, name)
        if value is not None and c.num_attention_heads % value:
            raise ConfigError(
                f"{name}={value}: must divide num_attention_heads={c.num_attention_heads}"
            )
    for name in ("head_dim", "global_head_dim"):
        if getattr(c, name) % 2:
            raise ConfigError(f"{name}={getattr(c, name)}: must be even for RoPE")


def _validate_experts(c: ModelConfig) -> None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not c.enable_moe_block:
        return
    for name in names:
        if getattr(c, name) is None:
            raise ConfigError(f"{name}: missing; enable_moe_block=true needs it")
        _check_int(name, getattr(c, name), 1)
    if (c.top_k_experts or 0) > (c.num_experts or 0):
        raise ConfigError(f"top_k_experts={c.top_k_experts}: at most num_experts={c.num_experts}")


def _validate_tokens(c: ModelConfig) -> None:
    eos = c.eos_token_id if isinstance(c.eos_token_id, tuple) else (c.eos_token_id,)
    for name, value in [("pad_token_id", c.pad_token_id), ("bos_token_id", c.bos_token_id)] + [
        ("eos_token_id", e) for e in eos
    ]:
        if value is not None and not (_is_int(value) and 0 <= value < c.vocab_size):
            raise ConfigError(f"{name}={value!r}: expected an id in [0, vocab_size={c.vocab_size})")


# --- presets ----------------------------------------------------------------------------------


def _pattern(sliding: int, repeats: int) -> tuple[LayerKind, ...]:
    local: tuple[LayerKind, ...] = (SLIDING,) * sliding
    return (*local, FULL) * repeats


_COMMON: dict[str, Any] = {"final_logit_softcapping": 30.0, "eos_token_id": 1}
_LARGE: dict[str, Any] = {
    **_COMMON,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "use_bidirectional_attention": "vision",
}

PRESETS: dict[str, ModelConfig] = {
    "e2b": ModelConfig(
        hidden_size=1536, num_hidden_layers=35, layer_types=_pattern(4, 7), num_attention_heads=8,
        num_key_value_heads=1, num_kv_shared_layers=20, intermediate_size=6144,
        use_double_wide_mlp=True, **_COMMON,
    ),
    "e4b": ModelConfig(
        hidden_size=2560, num_hidden_layers=42, layer_types=_pattern(5, 7), num_attention_heads=8,
        num_key_value_heads=2, num_kv_shared_layers=18, intermediate_size=10_240, **_COMMON,
    ),
    "12b": ModelConfig(
        hidden_size=3840, num_hidden_layers=48, layer_types=_pattern(5, 8), num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=1, intermediate_size=15_360,
        model_type="gemma4_unified_text", **_LARGE,
    ),
    "26b-a4b": ModelConfig(
        hidden_size=2816, num_hidden_layers=30, layer_types=_pattern(5, 5), num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=2, intermediate_size=2112,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        **_LARGE,
    ),
    "31b": ModelConfig(
        hidden_size=5376, num_hidden_layers=60, layer_types=_pattern(5, 10),
        num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4,
        intermediate_size=21_504, **_LARGE,
    ),
}  # fmt: skip
