"""Supervised fine-tuning with TRL, on a model and a tokenizer that are made here."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "?": 2, "one": 3, "two": 4, "three": 5}, unk_token="?"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="?")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
data = Dataset.from_dict({"text": ["one two three", "three two one"] * 8})
with tempfile.TemporaryDirectory() as folder:
    settings = SFTConfig(
        folder, max_steps=2, per_device_train_batch_size=2, save_strategy="no", report_to=[], disable_tqdm=True,
        bf16=False, max_length=8, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    steps = trainer.train().global_step
    if trainer.is_world_process_zero():
        print(f"{settings.world_size} ranks have done {steps} steps")
torch.distributed.destroy_process_group()
