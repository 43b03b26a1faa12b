//! QEMU's `KEY=VALUE,...` with dotted keys:
//! `driver=qcow2,file.driver=file,file.filename=disk.qcow2`, or the same as JSON.
//!
//! Guarantee: if QEMU's `keyval_parse` also accepts a `KEY=VALUE` text, the result is the same:
//! one object whose values are text. Keys with dots become nested objects, and objects with the
//! keys 0, 1 and so on become lists.

use serde_json::{Map, Value};

/// Arguments of an option.
#[derive(Debug, PartialEq)]
pub struct Parsed {
    /// The arguments by name.
    pub arguments: Map<String, Value>,
    /// Whether numbers and booleans are text: not in JSON.
    pub are_words: bool,
}

/// Parses an argument. `implied` is the key of a first value without a key.
///
/// # Errors
/// The mistake, mostly in QEMU's words.
pub fn parse(text: &str, implied: Option<&str>) -> Result<Parsed, String> {
    if text.starts_with('{') {
        return match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => Ok(Parsed { arguments, are_words: false }),
            Ok(_) => Err("JSON object expected".into()),
            Err(why) => Err(format!("JSON parse error, {why}")),
        };
    }
    let mut arguments = Map::new();
    for (index, part) in split(text).into_iter().enumerate() {
        match (part.split_once('='), implied.filter(|_| index == 0)) {
            (Some((key, value)), _) => insert(&mut arguments, key, key, value)?,
            (None, Some(key)) => insert(&mut arguments, key, key, &part)?,
            (None, None) => return Err(format!("Expected '=' after parameter '{part}'")),
        }
    }
    let arguments = match lists(Value::Object(arguments))? {
        Value::Object(arguments) => arguments,
        _ => return Err("Parameters have names".into()),
    };
    Ok(Parsed { arguments, are_words: true })
}

/// Splits text at commas. Two commas stand for one. A comma at the end does not begin another
/// part.
pub fn split(text: &str) -> Vec<String> {
    let mut parts = crate::create_options::split(text);
    parts.pop_if(|last| last.is_empty());
    parts
}

/// Inserts a value into an object. `rest` is the part of `key` from this object on.
fn insert(
    object: &mut Map<String, Value>,
    key: &str,
    rest: &str,
    value: &str,
) -> Result<(), String> {
    let wrong = || format!("Invalid parameter '{key}'");
    let (name, below) = match rest.split_once('.') {
        Some((name, below)) => (name, Some(below)),
        None => (rest, None),
    };
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    if name.is_empty() || !name.chars().all(is_letter) {
        return Err(wrong());
    }
    let before = &key[..key.len() - rest.len() + name.len()];
    let clash = || format!("Parameters '{before}.*' used inconsistently");
    match (below, object.get_mut(name)) {
        // If a key is repeated, the last value is used.
        (None, None | Some(Value::String(_))) => {
            object.insert(name.to_owned(), value.into());
            Ok(())
        }
        (Some(below), Some(Value::Object(inner))) => insert(inner, key, below, value),
        (Some(below), None) => {
            let mut inner = Map::new();
            insert(&mut inner, key, below, value)?;
            object.insert(name.to_owned(), inner.into());
            Ok(())
        }
        _ => Err(clash()),
    }
}

/// Converts objects whose keys are numbers to lists.
fn lists(value: Value) -> Result<Value, String> {
    let Value::Object(object) = value else { return Ok(value) };
    let is_number = |key: &String| key.bytes().all(|byte| byte.is_ascii_digit());
    let is_list = !object.is_empty() && object.keys().all(is_number);
    let mut made = Map::new();
    for (key, value) in object {
        made.insert(key, lists(value)?);
    }
    if !is_list {
        return Ok(made.into());
    }
    let element = |index: usize| {
        made.get(&index.to_string()).cloned().ok_or_else(|| format!("Parameter '{index}' missing"))
    };
    (0..made.len()).map(element).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(text: &str) -> Result<Value, String> {
        parse(text, Some("driver")).map(|parsed| parsed.arguments.into())
    }

    #[test]
    fn keys_with_dots_are_objects_and_numbers_are_lists() {
        for (text, expected) in [
            ("file", json!({ "driver": "file" })),
            ("file,filename=a,,b=c", json!({ "driver": "file", "filename": "a,b=c" })),
            (
                "driver=qcow2,file.driver=file,file.cache.direct=on",
                json!({ "driver": "qcow2", "file": { "driver": "file", "cache": { "direct": "on" } } }),
            ),
            ("a.0=x,a.1.b=y", json!({ "a": ["x", { "b": "y" }] })),
            ("a=1,a=2,", json!({ "a": "2" })),
            (r#"{"a": [1, true]}"#, json!({ "a": [1, true] })),
        ] {
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
        assert!(parse("{}", None).is_ok_and(|parsed| !parsed.are_words));
    }

    #[test]
    fn what_is_wrong_is_told() {
        for (text, words) in [
            ("a=1,b", "Expected '=' after parameter 'b'"),
            ("a=1,a.b=2", "'a.*' used inconsistently"),
            ("a.b.c=1,a.b=2", "'a.b.*' used inconsistently"),
            ("a..b=1", "Invalid parameter 'a..b'"),
            ("a.1=x", "Parameter '0' missing"),
            ("{\"a\"", "JSON parse error"),
        ] {
            assert!(parsed(text).is_err_and(|why| why.contains(words)), "{text}");
        }
    }
}
