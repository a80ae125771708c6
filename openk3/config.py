"""What a K3-like model is made of: one frozen dataclass, its named sizes, and its config.json.

Field names are those of the released config where it has them (model.md section 2). The fields under
"mechanisms" choose, when the model is built, between a K3 mechanism and what it replaced.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

CONTROL_SLOTS = 256  # control ids above the BPE ranks, in every vocabulary
A_LOG_PADDING = 128  # the released file stores A_log padded to a multiple of this
LARGEST = 2**31 - 1  # of a size: token and channel offsets are int32
MX_BLOCK = 32  # MXFP4 shares one scale among this many inputs

# MXFP4 of the routed experts, in the words of compressed-tensors (model.md section 2.3)
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": MX_BLOCK,
                "scale_dtype": "torch.uint8",
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}

# MoonViT-V2 and its projector (model.md section 2.4)
VISION: dict[str, Any] = {
    "patch_size": 14,
    "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 1024,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}

MECHANISMS: dict[str, tuple[Any, ...]] = {
    "attention": ("hybrid", "mla", "kda"),
    "decay": ("bounded", "softplus"),
    "kda_gate": ("full_rank", "low_rank"),
    "residual": ("block", "full", "plain"),
    "activation": ("situ", "swiglu"),
    "latent_moe": (True, False),
    "latent_norm": (True, False),
    "mla_position": ("nope", "rope"),
    "mla_gate": (True, False),
}  # the first value of each is K3's


@dataclass(frozen=True)
class K3Config:
    """Shape and mechanisms of one model. Raises ValueError naming the field and the values that clash."""

    hidden_size: int
    num_hidden_layers: int
    attn_res_block_size: int  # decoder layers (attention + FFN pairs) per AttnRes block
    vocab_size: int  # BPE ranks + 256 control ids
    kda_num_heads: int
    kda_head_dim: int  # key and value width of a KDA head
    num_attention_heads: int  # MLA heads
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    num_experts: int
    num_experts_per_token: int
    routed_expert_hidden_size: int  # latent width
    moe_intermediate_size: int
    intermediate_size: int  # dense FFN of the first layers
    num_shared_experts: int = 2
    first_k_dense_replace: int = 1
    kda_conv_size: int = 4
    kda_gate_lower_bound: float = -5.0
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    mla_lowrank_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_theta: float = 50000.0  # read by mla_position = "rope" alone
    max_position_embeddings: int = 1048576

    attention: str = "hybrid"
    decay: str = "bounded"
    kda_gate: str = "full_rank"
    residual: str = "block"
    activation: str = "situ"
    latent_moe: bool = True
    latent_norm: bool = True
    mla_position: str = "nope"
    mla_gate: bool = True

    def __post_init__(self) -> None:
        for name, allowed in MECHANISMS.items():
            value = getattr(self, name)
            if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
                raise ValueError(f"{name} = {value!r} is not one of {', '.join(map(repr, allowed))}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{field.name} = {value!r} is not a whole number")
                if value < (0 if field.name in _MAY_BE_ZERO else 1):
                    raise ValueError(f"{field.name} = {value} is too small")
                if value > LARGEST:
                    raise ValueError(f"{field.name} = {value} is too large; at most {LARGEST} can be")
            elif field.type == "float":
                self._check_number(field.name, value)
        self._check_shapes()

    @staticmethod
    def _check_number(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} = {value!r} is not a number")
        if name in _MUST_BE_POSITIVE and not value > 0:
            raise ValueError(f"{name} = {value} must be above 0")
        if name == "initializer_range" and value < 0:
            raise ValueError(f"{name} = {value} must not be negative")

    def _check_shapes(self) -> None:
        if self.vocab_size < CONTROL_SLOTS + 256:
            raise ValueError(
                f"vocab_size = {self.vocab_size} leaves no room for 256 bytes and {CONTROL_SLOTS} control ids"
            )
        if self.num_experts_per_token >= self.num_experts:
            raise ValueError(
                f"num_experts_per_token = {self.num_experts_per_token} must be below num_experts = "
                f"{self.num_experts}: the cutoff is the (k+1)-th score"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace = {self.first_k_dense_replace} exceeds num_hidden_layers = "
                f"{self.num_hidden_layers}"
            )
        if not -5.0 <= self.kda_gate_lower_bound < 0:
            raise ValueError(f"kda_gate_lower_bound = {self.kda_gate_lower_bound} is not in [-5, 0)")
        if self.mla_position == "rope" and self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even to be rotated")
        if not self.ablations:
            for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
                if getattr(self, name) % MX_BLOCK:
                    raise ValueError(f"{name} = {getattr(self, name)} is not a multiple of {MX_BLOCK}, the MXFP4 block")

    @property
    def n_ranks(self) -> int:
        """BPE ranks below the control ids."""
        return self.vocab_size - CONTROL_SLOTS

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """ "kda" or "mla" for each layer, 0-based: 3 KDA : 1 MLA and the last layer MLA (model.md section 1)."""
        n = self.num_hidden_layers
        if self.attention != "hybrid":
            return (self.attention,) * n
        return tuple("mla" if i % 4 == 3 or i == n - 1 else "kda" for i in range(n))

    @property
    def kda_width(self) -> int:
        """Width of each of the q, k, v projections of a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.routed_expert_hidden_size if self.latent_moe else self.hidden_size

    @property
    def moe_layers(self) -> range:
        return range(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def ablations(self) -> dict[str, Any]:
        """Mechanisms that differ from K3's."""
        return {name: getattr(self, name) for name, allowed in MECHANISMS.items() if getattr(self, name) != allowed[0]}

    def replace(self, **changes: Any) -> K3Config:
        return dataclasses.replace(self, **changes)

    def to_hf(self, *, packed: bool = False, vision: bool = False) -> dict[str, Any]:
        """The released config.json: nested, special ids derived from the rank count (model.md section 2).

        With `packed` it says that routed experts are MXFP4, with `vision` that the tower is there too.
        """
        kinds = self.layer_kinds
        text = {name: getattr(self, name) for name in _TEXT_FIELDS}
        text |= {
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": self.activation,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_renormalize": True,
            "routed_scaling_factor": 1.0,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "latent_moe_use_norm": self.latent_norm,
            "mla_use_nope": self.mla_position == "nope",
            "mla_use_output_gate": self.mla_gate,
            "num_nextn_predict_layers": 0,  # an MTP layer is saved apart, as a draft
            "linear_attn_config": {
                "num_heads": self.kda_num_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.kda_conv_size,
                "gate_lower_bound": self.kda_gate_lower_bound,
                "use_full_rank_gate": self.kda_gate == "full_rank",
                "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "mla"],
                "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "kda"],
            },
        }
        if packed:
            text["quantization_config"] = copy.deepcopy(QUANTIZATION)
        hf = {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "ignore_index": -100,
            "tie_word_embeddings": False,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "text_config": text,
        }
        hf |= {name: self.n_ranks + offset for name, offset in _SPECIAL_IDS.items()}
        if vision:
            hf["vision_config"] = copy.deepcopy(VISION) | {"text_hidden_size": self.hidden_size}
        return hf | ({"openk3": self.beyond_k3} if self.beyond_k3 else {})

    @property
    def beyond_k3(self) -> dict[str, Any]:
        """What the released config has no field for, where it is not as in K3: the "openk3" key of config.json."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        ours = {name: getattr(self, name) for name in _OWN_FIELDS} | self.ablations
        return {name: value for name, value in ours.items() if value != defaults[name]}

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> K3Config:
        """Read a config.json as released or as written by `to_hf`.

        Raises ValueError naming the fields that are absent, or that ask for what this model does not compute.
        """
        try:
            text = hf["text_config"]
            linear = text["linear_attn_config"]
            fields = {name: text[name] for name in _TEXT_FIELDS if name in text}
            fields |= {
                "kda_num_heads": linear["num_heads"],
                "kda_head_dim": linear["head_dim"],
                "kda_conv_size": linear["short_conv_kernel_size"],
                "kda_gate_lower_bound": float(linear["gate_lower_bound"]),
            }
            config = cls(**fields, **hf.get("openk3", {}))
            ours = config.to_hf()["text_config"]
            given = {name: text[name] for name in ours if name in text} | {name: linear[name] for name in _LAYER_LISTS}
            given |= {name: linear[name] for name in ours["linear_attn_config"] if name in linear}
        except KeyError as error:
            raise ValueError(f"config.json has no field {error}") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"config.json does not describe a K3 model: {error}") from None
        flat = ours | ours["linear_attn_config"]
        wrong = [f"{n} = {given[n]!r} must be {flat[n]!r}" for n in given if n not in _NESTED and given[n] != flat[n]]
        if wrong:
            raise ValueError("config.json describes another model than K3: " + "; ".join(wrong))
        return config


_MAY_BE_ZERO = ("first_k_dense_replace",)
_MUST_BE_POSITIVE = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "rms_norm_eps",
    "mla_lowrank_norm_eps",
    "rope_theta",
)
_TEXT_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "attn_res_block_size",
    "vocab_size",
    "num_attention_heads",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "routed_expert_hidden_size",
    "moe_intermediate_size",
    "intermediate_size",
    "first_k_dense_replace",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
)
_NESTED = ("architectures", "model_type", "linear_attn_config")  # names and what is compared field by field
_LAYER_LISTS = ("full_attn_layers", "kda_layers")
_OWN_FIELDS = ("mla_lowrank_norm_eps", "rope_theta")
# K3 id - 163584: an id is n_ranks + offset in every vocabulary
_SPECIAL_IDS = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "media_placeholder_token_id": 21,
    "pad_token_id": 255,
}

_PICO = K3Config(
    hidden_size=64, num_hidden_layers=5, attn_res_block_size=2, vocab_size=512 + CONTROL_SLOTS,
    kda_num_heads=2, kda_head_dim=32,
    num_attention_heads=2, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, q_lora_rank=32, kv_lora_rank=32,
    num_experts=8, num_experts_per_token=2, routed_expert_hidden_size=32, moe_intermediate_size=32,
    intermediate_size=128,
)  # fmt: skip
_NANO = K3Config(
    hidden_size=128, num_hidden_layers=5, attn_res_block_size=2, vocab_size=2048 + CONTROL_SLOTS,
    kda_num_heads=4, kda_head_dim=32,
    num_attention_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, q_lora_rank=48, kv_lora_rank=32,
    num_experts=24, num_experts_per_token=2, routed_expert_hidden_size=64, moe_intermediate_size=64,
    intermediate_size=512,
)  # fmt: skip
_MINI = K3Config(
    hidden_size=512, num_hidden_layers=13, attn_res_block_size=4, vocab_size=16384,
    kda_num_heads=4, kda_head_dim=128,
    num_attention_heads=4, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    q_lora_rank=192, kv_lora_rank=128,
    num_experts=28, num_experts_per_token=4, routed_expert_hidden_size=256, moe_intermediate_size=224,
    intermediate_size=1536,
)  # fmt: skip
_SMALL = K3Config(
    hidden_size=2048, num_hidden_layers=25, attn_res_block_size=6, vocab_size=32768,
    kda_num_heads=16, kda_head_dim=128,
    num_attention_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    q_lora_rank=512, kv_lora_rank=256,
    num_experts=48, num_experts_per_token=4, routed_expert_hidden_size=1024, moe_intermediate_size=512,
    intermediate_size=8192,
)  # fmt: skip
_K3 = K3Config(
    hidden_size=7168, num_hidden_layers=93, attn_res_block_size=12, vocab_size=163840,
    kda_num_heads=96, kda_head_dim=128,
    num_attention_heads=96, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    q_lora_rank=1536, kv_lora_rank=512,
    num_experts=896, num_experts_per_token=16, routed_expert_hidden_size=3584, moe_intermediate_size=3072,
    intermediate_size=33792,
)  # fmt: skip

SIZES: dict[str, K3Config] = {"pico": _PICO, "nano": _NANO, "mini": _MINI, "small": _SMALL, "k3": _K3}


def named(name: str) -> K3Config:
    """One of the named sizes. Raises ValueError listing them."""
    if name not in SIZES:
        raise ValueError(f"there is no size {name!r}; the sizes are {', '.join(SIZES)}")
    return SIZES[name]
