"""Configurations of tiny models, one function per architecture, every layer kind present.

All are hidden size 64 with windows, chunks and groups of 16, two to six layers. A configuration is
what `config.json` holds; `tiny.build_tiny` adds the token ids and writes the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Config = dict[str, Any]

HIDDEN = 64
WINDOW = 16
"""Sliding window and attention chunk of every tiny model, in tokens."""


def _base(vocab: int, head_dim: int, **changes: Any) -> Config:
    heads = HIDDEN // head_dim
    config: Config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | changes


def llama(vocab: int, head_dim: int) -> Config:
    return _base(vocab, head_dim)


def qwen2(vocab: int, head_dim: int) -> Config:
    config = _base(vocab, head_dim, tie_word_embeddings=True)
    del config["head_dim"]
    return config


def qwen3(vocab: int, head_dim: int) -> Config:
    return _base(vocab, head_dim, tie_word_embeddings=True)


def deepseek_v2(vocab: int, head_dim: int) -> Config:
    yarn = {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return _latent_attention(vocab, head_dim) | {"rope_scaling": yarn, "topk_method": "greedy"}


def deepseek_v3(vocab: int, head_dim: int) -> Config:
    return _latent_attention(vocab, head_dim) | {"scoring_func": "sigmoid", "norm_topk_prob": True}


def _latent_attention(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=3,
        num_key_value_heads=HIDDEN // head_dim,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=head_dim,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        routed_scaling_factor=1.0,
    )


def gemma2(vocab: int, head_dim: int) -> Config:
    return _base(vocab, head_dim, query_pre_attn_scalar=head_dim, tie_word_embeddings=True)


def gemma3_text(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        query_pre_attn_scalar=head_dim,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        rope_local_base_freq=1000.0,
        tie_word_embeddings=True,
    )


def cohere2(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        logit_scale=0.5,
        layer_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def gpt_oss(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def qwen3_next(vocab: int, head_dim: int) -> Config:
    return _linear_attention(vocab, head_dim) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    }


def qwen3_5(vocab: int, head_dim: int) -> Config:
    text = _linear_attention(vocab, head_dim) | {"model_type": "qwen3_5_text"}
    rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return {"text_config": text | {"rope_parameters": rope}}


def _linear_attention(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        full_attention_interval=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
    )


def lfm2(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=HIDDEN,
        block_ff_dim=128,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
        tie_word_embeddings=True,
    )


def mamba(vocab: int, head_dim: int) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "state_size": head_dim,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    }


def mamba2(vocab: int, head_dim: int) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "num_heads": 2 * HIDDEN // head_dim,
        "head_dim": head_dim,
        "intermediate_size": 2 * HIDDEN,
        "state_size": 32,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    }


def falcon_h1(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        mamba_d_conv=4,
        mamba_d_head=head_dim,
        mamba_d_ssm=2 * HIDDEN,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_n_heads=2 * HIDDEN // head_dim,
        mamba_chunk_size=WINDOW,
        tie_word_embeddings=False,
        lm_head_multiplier=0.5,
        embedding_multiplier=2.0,
    )


def jamba(vocab: int, head_dim: int) -> Config:
    return _base(
        vocab,
        head_dim,
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )


def llama4(vocab: int, head_dim: int) -> Config:
    text = _base(
        vocab,
        head_dim,
        model_type="llama4_text",
        num_hidden_layers=4,
        attention_bias=False,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=128,
        num_experts_per_tok=1,
        num_local_experts=4,
        rope_scaling=None,
        use_qk_norm=True,
    )
    return {"text_config": text}


def gemma3n(vocab: int, head_dim: int) -> Config:
    """Six layers: the last two read the keys and values of layers 2 and 3 (shared KV)."""
    text = _base(
        vocab,
        head_dim,
        model_type="gemma3n_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=vocab,
        sliding_window=WINDOW,
        rope_local_base_freq=1000.0,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4,
        hidden_size_per_layer_input=16,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    )
    return {"text_config": text}


def phi3(vocab: int, head_dim: int) -> Config:
    return _base(vocab, head_dim, partial_rotary_factor=1.0)


def rwkv7(vocab: int, head_dim: int) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "head_dim": head_dim,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
        "tie_word_embeddings": False,
    }


CONFIGS: dict[str, Callable[[int, int], Config]] = {
    build.__name__: build
    for build in (
        llama,
        qwen2,
        qwen3,
        deepseek_v2,
        deepseek_v3,
        gemma2,
        gemma3_text,
        cohere2,
        gpt_oss,
        qwen3_next,
        qwen3_5,
        lfm2,
        mamba,
        mamba2,
        falcon_h1,
        jamba,
        llama4,
        gemma3n,
        phi3,
        rwkv7,
    )
}
