"""How a request speculates: the fields `speculation` and `prediction` of bodies. Neither changes a token of the answer.

speculation   {"enabled": false}   {"sources": ["ngram"], "max_drafts": 4}
prediction    {"type": "content", "content": "the text that most of the answer repeats"}, as in OpenAI's API
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from protos.errors import InvalidRequest
from protos.values import MAX_DRAFTS, SPECULATION_SOURCES, SpeculationParams
from router.gateway import Gateway
from router.http.body import Body, FirstWrong, at_most
from router.text.sampling_request import SamplingRequest

_SOURCES = ", ".join(SPECULATION_SOURCES)


class SpeculationBody(Body):
    enabled: bool | None = Field(default=None, description="true or false: nothing is drafted for this request")
    sources: (
        Annotated[
            list[Literal["ngram", "suffix", "prediction", "model", "eagle", "medusa", "mtp"]],
            FirstWrong(),
            at_most(len(SPECULATION_SOURCES)),
        ]
        | None
    ) = Field(default=None, min_length=1, description=f"a list of at least one of {_SOURCES}")
    max_drafts: int | None = Field(
        default=None,
        description=f"an integer between 1 and {MAX_DRAFTS}",
        json_schema_extra={"minimum": 1, "maximum": MAX_DRAFTS},
    )

    def to_params(self) -> SpeculationParams:
        return SpeculationParams(
            mode="off" if self.enabled is False else "",
            max_drafts=0 if self.max_drafts is None else self.max_drafts or -1,
            sources=tuple(self.sources or ()),
        )


class PredictionPart(Body):
    type: Literal["text"] = Field(description='"text"')
    text: str = Field(description="a string")


class PredictionBody(Body):
    type: Literal["content"] = Field(description='"content"')
    content: str | Annotated[list[PredictionPart], FirstWrong()] = Field(description="a string or a list of text parts")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


async def with_speculation(
    gateway: Gateway, sampling: SamplingRequest, speculation: SpeculationBody | None, prediction: PredictionBody | None
) -> SamplingRequest:
    """Raises InvalidRequest for a prediction longer than the model's context."""
    params = speculation.to_params() if speculation is not None else sampling.speculation
    if prediction is not None:
        params = await with_prediction(gateway, params, prediction.text)
    return sampling if params is sampling.speculation else replace(sampling, speculation=params)


async def with_prediction(gateway: Gateway, params: SpeculationParams, text: str) -> SpeculationParams:
    """The parameters with the tokens of a predicted text. Raises InvalidRequest."""
    longest = gateway.card.max_model_len
    num_tokens = gateway.texts.tokenizer.min_tokens(text)
    if num_tokens <= longest:
        [prediction_ids] = await gateway.texts.tokenizer.encode([text], add_special_tokens=False)
        num_tokens = len(prediction_ids)
        if num_tokens <= longest:
            return SpeculationParams(
                mode=params.mode, max_drafts=params.max_drafts, sources=params.sources, prediction_ids=prediction_ids
            )
    problem = f"'prediction' has at least {num_tokens} tokens"
    raise InvalidRequest(
        f"{problem}: it must have at most {longest}, which the model's context holds", param="prediction"
    )
