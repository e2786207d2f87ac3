"""Functions that a request offers to the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from router.http.body_validation import MAX_DEPTH, OpenBody, Schema
from router.text.tools.calls import Function

MAX_TOOLS = 512
TOOLS: Any = Field(default=None, max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} tools")


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("arguments have names")
    return schema


Parameters = Annotated[Schema, AfterValidator(_of_object)]


def parameters_field(default: Any = None, **more: Any) -> Any:
    return Field(
        default=default,
        description=f"a JSON Schema whose type is object, nested at most {MAX_DEPTH} deep",
        json_schema_extra={"properties": {"type": {"const": "object"}}},
        **more,
    )


class FunctionSpec(OpenBody):
    name: str = Field(
        pattern=r"^[a-zA-Z0-9_.-]{1,128}$", description="1 to 128 letters, digits, underscores, dots and dashes"
    )
    description: str | None = Field(default=None, description="a string")
    parameters: Parameters | None = parameters_field()
    strict: bool | None = Field(default=None, description="true or false")

    def to_function(self) -> Function:
        return Function(name=self.name, parameters=self.parameters, strict=bool(self.strict))

    def shown(self) -> dict[str, Any]:
        """The tool in the form of chat templates, which is OpenAI's."""
        fields = {name: getattr(self, name) for name in FunctionSpec.model_fields}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
