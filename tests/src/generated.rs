//! The option reference and the schema of the control socket, as the binary under test makes them.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use crate::{Scratch, blockhouse, run};

static GENERATED: LazyLock<(String, Value)> = LazyLock::new(|| {
    let scratch = Scratch::new();
    let folder = scratch.path("generated");
    std::fs::create_dir(&folder).expect("a folder");
    run(Command::new(blockhouse()).arg("__generate").arg(&folder)).success();
    let read = |name| std::fs::read_to_string(folder.join(name)).expect("a generated file");
    let schema = serde_json::from_str(&read("control.schema.json")).expect("the schema is JSON");
    (read("options.md"), schema)
});

/// Every command with its options and examples, in Markdown.
pub fn options() -> &'static str {
    &GENERATED.0
}

/// The schema of the control socket.
pub fn control_schema() -> &'static Value {
    &GENERATED.1
}
