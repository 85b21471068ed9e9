"""Texts and tokens: `icehouse tokenize`, `detokenize`, `embed` and `rerank`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from icehouse_client.chat import Infill
from icehouse_client.cli.connection import Server, server_of
from icehouse_client.cli.console import (
    AsJson,
    facts_table,
    out,
    print_json,
    print_text,
    printable,
    show,
    table,
)
from icehouse_client.cli.option_groups import count, said, with_groups
from icehouse_client.cli.prompt import (
    Adapter,
    GivenPrompt,
    Model,
    Suffix,
    given_text,
    prompt_of,
    read_token_ids,
)
from icehouse_client.conversation import Conversation
from icehouse_client.embeddings import Pooling


@with_groups(server=server_of, prompt=prompt_of)
def tokenize(
    prompt: GivenPrompt,
    server: Server,
    suffix: Suffix = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Print the ids on one line, as --tokens accepts them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tokens of a text or conversation as the model gets them."""
    asked = prompt.read(suffix)
    if not isinstance(asked, str | Conversation | Infill):
        raise typer.BadParameter("--tokens are already tokens; give TEXT or --messages")
    tokens = server.client.tokenize(asked, model=prompt.options.get("model", ""))
    if ids and not as_json:
        out.print(",".join(str(token.id) for token in tokens), markup=False)
        return
    pieces = ((str(token.id), Text(printable(token.piece))) for token in tokens)
    shown = facts_table(*pieces, style="", justify="right")
    facts = [{"id": token.id, "piece": token.piece} for token in tokens]
    show(facts, Group(shown, f"{len(tokens):,} tokens"), as_json=as_json)


@with_groups(server=server_of)
def detokenize(
    server: Server,
    tokens: Annotated[
        str, typer.Argument(help="Token ids, separated by commas or spaces; - reads standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the text of tokens, without special tokens that begin, end or pad a text."""
    token_ids = read_token_ids(given_text(tokens))
    text = server.client.detokenize(token_ids)
    if as_json:
        print_json({"text": text})
    else:
        print_text(text, end="\n")


@with_groups(server=server_of)
def embed(
    server: Server,
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; - reads lines from standard input.")],
    pooling: Annotated[
        Pooling | None, typer.Option(help="How tokens become one vector; by default the server's choice.")
    ] = None,
    dimensions: Annotated[int | None, count(min=1, help="Keep only this many dimensions.")] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Whether to scale vectors to length 1; the default.")
    ] = None,
    prompt_name: Annotated[
        str, typer.Option(help="Name of one of the model's own prompts, put before each text.")
    ] = "",
    model: Model = "",
    adapter: Adapter = "",
    as_json: AsJson = False,
) -> None:
    """Print the vector of each text: one per line, or with --json a list with the texts."""
    inputs = given_text("-").splitlines() if texts == ["-"] else texts
    options = said(
        model=model,
        adapter=adapter,
        pooling=pooling,
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
    )
    vectors = server.client.embed(inputs, **options)
    pairs = [{"text": text, "vector": v} for text, v in zip(inputs, vectors, strict=True)]
    for each in [pairs] if as_json else vectors:
        print_json(each, indent=None)


@with_groups(server=server_of)
def rerank(
    server: Server,
    query: Annotated[str, typer.Argument(help="The query.")],
    documents: Annotated[
        list[str], typer.Argument(help="Documents to rank; - reads lines from standard input.")
    ],
    top_count: Annotated[int | None, count(min=1, help="Show only this many, the best ones.")] = None,
    instruction: Annotated[str, typer.Option(help="The task, in words for the model.")] = "",
    text: Annotated[
        str, typer.Option(help="Your own prompt in plain text, containing {query} and {document}.")
    ] = "",
    positive_answer: Annotated[str, typer.Option(help="The word that means yes.")] = "",
    negative_answer: Annotated[str, typer.Option(help="The word that means no.")] = "",
    model: Model = "",
    adapter: Adapter = "",
    as_json: AsJson = False,
) -> None:
    """Rank texts by how well they answer a query, best first, with the probability of each."""
    texts = given_text("-").splitlines() if documents == ["-"] else documents
    options = said(
        top_count=top_count,
        instruction=instruction,
        text=text,
        positive_answer=positive_answer,
        negative_answer=negative_answer,
        model=model,
        adapter=adapter,
    )
    ranking = server.client.rerank(query, texts, **options)
    shown = table("score", "text", figures=("score",))
    for each in ranking:
        shown.add_row(f"{each.score:.3f}", Text(printable(texts[each.index])))
    found = [{"index": each.index, "score": each.score, "text": texts[each.index]} for each in ranking]
    show(found, shown, as_json=as_json)
