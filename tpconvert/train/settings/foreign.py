"""What other trainers call a key of the configuration, for those who come from them."""

from __future__ import annotations

FOREIGN = {
    "training.steps": "max_steps total_steps train_iters num_steps iterations",
    "training.epochs": "num_train_epochs num_epochs max_epochs epoch",
    "training.micro_batch_size": "per_device_train_batch_size per_gpu_batch_size local_batch_size batch_size mbs",
    "training.global_batch_size": "gradient_accumulation_steps grad_accum accumulation accumulation_steps gbs",
    "training.seq_len": "max_seq_length max_length block_size context_length model_max_length",
    "training.precision": "bf16 fp16 fp8 tf32 dtype mixed_precision torch_dtype param_dtype",
    "training.optimizer": "optim",
    "training.lr": "learning_rate max_lr",
    "training.schedule": "lr_scheduler_type lr_decay_style lr_scheduler scheduler decay_type",
    "training.warmup_steps": "lr_warmup_iters num_warmup_steps warmup_ratio warmup",
    "training.weight_decay": "wd",
    "training.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "training.eps": "adam_epsilon adam_eps",
    "training.clip": "max_grad_norm clip_grad max_norm gradient_clipping grad_clip",
    "training.seed": "data_seed",
    "parallelism.data_parallel": "fsdp ddp data_parallel_size zero zero_stage deepspeed ddp_backend",
    "parallelism.activation_checkpointing": "gradient_checkpointing recompute recompute_granularity",
    "parallelism.compile": "torch_compile",
    "parallelism.cuda_graphs": "cuda_graph enable_cuda_graph use_cuda_graph cuda_graph_impl external_cuda_graph",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep": "save_total_limit keep_last keep_latest_k",
    "checkpoint.keep_best": "load_best_model_at_end save_best_only save_best keep_best_checkpoint",
    "checkpoint.best_metric": "metric_for_best_model monitor",
    "checkpoint.resume": "resume_from_checkpoint load",
    "checkpoint.asynchronous": "async_save async_mode",
    "logging.every": "logging_steps log_interval log_freq",
    "logging.tensorboard": "report_to enable_tensorboard",
    "data.path": "train_file data_path dataset_path train_data",
    "data.hub": "dataset_name",
    "data.subset": "dataset_config_name",
    "data.field": "text_column text_field dataset_text_field",
    "data.workers": "dataloader_num_workers num_workers",
    "data.mask_probability": "mlm_probability",
    "data.pack": "packing",
    "data.eval": "evaluation validation eval_dataset validation_file valid",
    "data.eval.every": "eval_steps eval_interval eval_every",
    "data.eval.batches": "eval_iters max_eval_samples",
    "data.eval.fraction": "validation_split validation_split_percentage",
}
"""A key -> what it is elsewhere."""
ELSEWHERE = {
    "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size": (
        "the sharded folder says it (tpconvert shard --tp N)"
    ),
    "dp dp_size data_parallel_degree": "it is the ranks in all over tp",
}
"""What no key says -> what does."""


def meant(word: str) -> str:
    """What to say of the word of another trainer; nothing of any other.

    >>> meant("learning_rate"), meant("tp")
    ('That is training.lr here.', 'Leave it out: the sharded folder says it (tpconvert shard --tp N).')
    """
    for words, text in ELSEWHERE.items():
        if word in words.split():
            return f"Leave it out: {text}."
    return next((f"That is {key} here." for key, words in FOREIGN.items() if word in words.split()), "")
