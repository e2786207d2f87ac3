"""The form that a request sets for its answer: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from protos.errors import InvalidRequest
from router.faces.conversation.tooling import AnswerSchema
from router.http.body import MAX_DEPTH, Body, FirstWrong, Schema, at_most, read_json
from router.text.grammar.structure import MAX_CHOICES, choice_grammar, json_grammar, lark_grammar, regex_grammar

_SCHEMA = f"a JSON Schema: an object nested at most {MAX_DEPTH} deep"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def _read(schema: Any) -> Any:
    """Like vLLM, which also accepts a schema's text. Raises InvalidRequest."""
    if not isinstance(schema, str):
        return schema
    try:
        return read_json(schema)
    except ValueError as error:
        raise InvalidRequest(
            f"'structured_outputs.json' is a text that is not JSON: {error}; give the JSON Schema itself, or its text",
            param="structured_outputs.json",
        ) from None


_TEXT = {"type": "string", "contentMediaType": "application/json"}
WrittenSchema = Annotated[Schema, BeforeValidator(_read), WithJsonSchema({"anyOf": [_ANY_OBJECT, _TEXT]})]


class JsonSchema(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 letters, digits, underscores and dashes")
    description: str | None = Field(default=None, description="a string")
    schema_: Schema | None = Field(default=None, alias="schema", description=_SCHEMA)
    strict: bool | None = Field(default=None, description="true or false")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    json_schema: JsonSchema | None = Field(
        default=None, description='an object such as {"name": "answer", "schema": {...}}'
    )

    def answer_schema(self) -> AnswerSchema | None:
        """None for text. Raises InvalidRequest."""
        if self.type == "json_object":
            return AnswerSchema(schema=_ANY_OBJECT)
        if self.type == "text":
            return None
        if self.json_schema is None:
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.", param="response_format.json_schema"
            )
        schema = self.json_schema.schema_
        lenient = self.json_schema.strict is False
        return AnswerSchema(schema=_ANY_OBJECT if schema is None else schema, lenient=lenient)


_ONE = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(Body):
    """Exactly one of them."""

    json_: WrittenSchema | None = Field(default=None, alias="json", description=f"{_SCHEMA}, or its text")
    regex: str | None = Field(default=None, description="a regular expression")
    choice: Annotated[list[str] | None, FirstWrong(), at_most(MAX_CHOICES)] = Field(
        default=None, min_length=1, max_length=MAX_CHOICES, description=f"a list of 1 to {MAX_CHOICES} strings"
    )
    grammar: str | None = Field(default=None, min_length=1, description="a Lark or EBNF grammar")
    json_object: bool | None = Field(default=None, description="true or false")
    disable_any_whitespace: bool | None = Field(default=None, description="true or false")

    @staticmethod
    def forms() -> tuple[str, ...]:
        return _ONE

    def to_grammar(self, *, compact: bool) -> str:
        """`compact`: JSON has no white space unless the request allows it. Raises InvalidRequest."""
        forms = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        given = [form for form in forms if form is not None]
        if len(given) != 1:
            problem = f"'structured_outputs' has {len(given)} of {', '.join(_ONE)}"
            raise InvalidRequest(f"{problem}: give exactly one", param="structured_outputs")
        schema = _ANY_OBJECT if self.json_object else self.json_
        if schema is not None:
            disabled = self.disable_any_whitespace
            return json_grammar(schema, compact=compact if disabled is None else disabled)
        if self.regex is not None:
            return regex_grammar(self.regex)
        return choice_grammar(self.choice) if self.choice is not None else lark_grammar(self.grammar or "")
