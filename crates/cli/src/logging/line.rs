//! One line of the log, and the forms in which it is written.

use std::fmt::{self, Write};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// How lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineFormat {
    /// Level, message and fields: for a person who has just typed a command.
    Plain,
    /// As `Plain`, after the time in UTC.
    Timed,
    /// A JSON object with `time`, `level`, `target`, `message` and the fields.
    Json,
}

/// The content of a line.
#[derive(Debug)]
pub struct Line {
    pub level: Level,
    /// The part of the program that logs the line.
    pub target: &'static str,
    pub message: String,
    pub fields: Vec<(&'static str, Value)>,
}

impl Line {
    /// A line that the log writes about itself.
    pub fn of_log(level: Level, message: String) -> Self {
        Self { level, target: "blockhouse", message, fields: Vec::new() }
    }

    /// The line of an event.
    pub fn of_event(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let (level, target) = (*metadata.level(), metadata.target());
        let mut line = Self { level, target, message: String::new(), fields: Vec::new() };
        event.record(&mut line);
        line
    }

    /// The line with its end.
    pub fn render(&self, format: LineFormat) -> String {
        match format {
            LineFormat::Plain => self.text(),
            LineFormat::Timed => format!("{} {}", now(), self.text()),
            LineFormat::Json => self.json(),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{:>5} {}", self.level, self.message);
        for (name, value) in &self.fields {
            // Writing to a string does not fail.
            let _ = write!(text, " {name}={value}");
        }
        let mut line = visible(&text);
        line.push('\n');
        line
    }

    fn json(&self) -> String {
        let mut object = Map::new();
        let mut add = |name: &str, value: Value| drop(object.insert(name.into(), value));
        for (name, value) in &self.fields {
            add(name, value.clone());
        }
        // These keys are added last, so that fields of the same name do not replace them.
        add("time", now().into());
        add("level", level_name(self.level).into());
        add("target", self.target.into());
        add("message", self.message.clone().into());
        format!("{}\n", Value::Object(object))
    }
}

/// A text as one line, with control characters escaped, so that names that others chose can neither
/// begin a new line nor control the terminal.
pub fn visible(text: &str) -> String {
    // Characters that change the direction of text, and so the order in which a line is shown.
    let reorders = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut line = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if c.is_control() || reorders(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    }
}

/// The time in UTC, as RFC 3339 has it.
fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

impl Line {
    fn take(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            ("message", other) => self.message = other.to_string(),
            (name, value) => self.fields.push((name, value)),
        }
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.take(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.take(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.take(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        let fields = vec![("disk", "a.img".into()), ("count", 3.into())];
        let message = "it says \"no\"\nand more".into();
        Line { fields, ..Line::of_log(Level::WARN, message) }
    }

    #[test]
    fn text_is_level_message_and_fields() {
        let text = line().render(LineFormat::Plain);
        assert_eq!(text, " WARN it says \"no\"\\nand more disk=\"a.img\" count=3\n");
        let timed = line().render(LineFormat::Timed);
        let (time, rest) = timed.split_once(' ').expect("a time");
        assert_eq!(rest, text);
        assert!(time.starts_with("20") && time.ends_with('Z') && time.contains('T'), "{time}");
    }

    #[test]
    fn names_begin_no_line_and_control_no_terminal() {
        let line = Line::of_log(Level::INFO, "a\r\n\u{1b}[31mé\u{9b}\u{202e}".into());
        let text = line.render(LineFormat::Plain);
        assert_eq!(text, " INFO a\\r\\n\\u{1b}[31mé\\u{9b}\\u{202e}\n");
    }

    #[test]
    fn json_is_one_line_whatever_the_message() {
        let text = line().render(LineFormat::Json);
        assert_eq!(text.lines().count(), 1);
        let read: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read["level"], "warning");
        assert_eq!(read["message"], "it says \"no\"\nand more");
        assert_eq!((&read["disk"], &read["count"]), (&"a.img".into(), &3.into()));
    }
}
