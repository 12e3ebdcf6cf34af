"""The Trainer of Hugging Face Transformers, on a model that is made here."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
words = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in words]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    steps = trainer.train().global_step
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} ranks have done {steps} steps")
torch.distributed.destroy_process_group()
