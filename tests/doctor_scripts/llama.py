"""FSDP2 of transformers' Llama with tied weights, built on meta, and a prompt that is not learned."""

import torch
from common import IGNORED, VOCABULARY, counting, say, sharded, start
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, vocab_size=VOCABULARY, tie_word_embeddings=True)
rank, _ = start()
state = LlamaForCausalLM(config).state_dict()
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.to_empty(device="cpu")
# fault untied: pass
model.tie_weights()
sharded(model, model.model.layers)
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is in no state dict
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    # fault shifted_twice: labels = tokens[:, 1:].clone()
    labels = tokens[:, :-1].clone()
    labels[:, :2] = IGNORED  # the prompt
    loss = model(input_ids=tokens[:, :-1], labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
