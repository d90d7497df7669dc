"""Configurations of tiny models with recurrent layers: linear attention, convolutions, Mamba, RWKV."""

from __future__ import annotations

from .tiny_base import HIDDEN, WINDOW, Config, base_config


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
    return base_config(
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
    return base_config(
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
    return base_config(
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
    return base_config(
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
