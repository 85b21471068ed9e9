"""Forward passes over tokens of many rows at once: decoding, prompts and guesses read the weights once.

To use it, make one ForwardPass for each module tree (the model, each LoRA adapter), all on one thread:

    facts = yield from examine_steps(model, ...) # once at load: how rows are split; log facts.reason
    forward = ForwardPass(model, facts)
    row = Row(make_caches())                     # or Row(restored_caches, token_count=n)
    output = forward.run(token_ids, [Share(row, count, logit_count=1), ...])
    mx.async_eval(output.arrays)                 # the next pass may be built on tokens that are not drawn yet

- `token_ids` is one flat int array, share after share, with the shares in any order; it may be lazy.
- A share's logits and hidden states are those of its last `logit_count` and `hidden_count` tokens, found by
  `output.logit_spans` and `hidden_spans` in the order of the shares.
- Guesses: `Share(..., logit_count=k + 1, may_be_taken_back=True)`, then `row.take_back(wrong_count)`; the
  number it returns must be fed again in the row's next share (0 unless `facts.caches` holds states).
- A chunk may go through a few layers in each pass, if `facts.layer_count`:
  `chunk = forward.begin_layers(row, token_ids)`, then `forward.run_layers(chunk, last)` until `last` is that
  count. Until then the row does not change, and must not be fed; dropping the chunk loses nothing else.
- `Share.features` replace tokens' embeddings: the vectors that a vision tower made of an image.
- `row.caches` are mlx-lm's own caches with all of the row in them, to be cut or stored. They hold
  `row.token_count` tokens. Evaluate what is made of them before the next pass.
- Call `row.leave_group()` when the row ends.
"""
