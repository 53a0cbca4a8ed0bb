"""One click group per noun; bodies parse, call once, and emit. The only folder that imports click."""
