"""Keywords of JSON Schema whose value is a schema, a list of schemas, or schemas by name."""

from __future__ import annotations

ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
