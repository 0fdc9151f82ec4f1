"""A small language model with random weights, and a tokenizer made from the text that it is to be trained on."""

from tokenizers import ByteLevelBPETokenizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from rlhf_details import toy
from rlhf_details.plumbing import cli, models


def make(args, rows):
    """Returns (tokenizer, model): byte-level BPE trained on the rows' text, and a GPT-NeoX of the sizes that args give.

    An embedded task brings its own tokenizer. Args: rows, dictionaries with the strings `prompt` and `completion`.
    """
    if not all(isinstance(row["prompt"], str) for row in rows):
        cli.fail("--base_model scratch: makes its tokenizer from text, and knows no messages and no token ids")
    task = args.dataset.partition(":")[0]
    if task in toy.TASKS:
        tokenizer = toy.tokenizer(task)
    else:
        backend, texts = ByteLevelBPETokenizer(), [row["prompt"] + row["completion"] for row in rows]
        options = dict(min_frequency=2, special_tokens=["<pad>", "<eos>"], show_progress=False)
        backend.train_from_iterator(texts, args.vocab_size, **options)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.context_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=args.attn_implementation,
    )
    return tokenizer, models.set_up(GPTNeoXForCausalLM(config), args)
