//! Messages of JSON-RPC 2.0, one on each line. There are no batches: a client sends several lines
//! instead.

use blockhouse_core::{Error, ErrorKind};
use serde_json::{Map, Value, json};

/// A line that is not valid JSON.
pub(super) const PARSE_ERROR: i64 = -32700;
/// Valid JSON that is not a request.
pub(super) const INVALID_REQUEST: i64 = -32600;
/// A method that does not exist.
pub(super) const UNKNOWN_METHOD: i64 = -32601;
/// Parameters that do not fit the method.
pub(super) const INVALID_PARAMS: i64 = -32602;
/// The request is valid but failed; the message says why, in one line.
pub(super) const FAILED: i64 = -32000;
/// The request failed because a bitmap lacks changes. An incremental backup is not possible; a full
/// backup is needed.
pub const LACKS_CHANGES: i64 = -32001;

/// A request.
#[derive(Debug)]
pub(super) struct Call {
    /// The id of the request; `None`: the client expects no answer.
    pub(super) id: Option<Value>,
    pub(super) method: String,
    /// An object.
    pub(super) params: Value,
}

/// Why a request has no result.
#[derive(Debug)]
pub struct Failure {
    pub(super) code: i64,
    /// One line.
    pub message: String,
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        let kind = error.downcast_ref::<Error>().map(Error::kind);
        let code = if kind == Some(ErrorKind::LacksChanges) { LACKS_CHANGES } else { FAILED };
        Self { code, message: format!("{error:#}") }
    }
}

impl Failure {
    /// A failure with one of the codes above.
    pub(super) fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Parses a JSON object as a request.
///
/// # Errors
/// The id for the answer, and the reason why the object is not a request.
pub(super) fn parse(mut object: Map<String, Value>) -> Result<Call, (Value, Failure)> {
    let id = object.remove("id");
    let refused = |id: Option<&Value>, why: &str| {
        let id = id.filter(|id| is_id(id)).cloned().unwrap_or_default();
        Err((id, Failure::new(INVALID_REQUEST, why)))
    };
    if id.as_ref().is_some_and(|id| !is_id(id)) {
        return refused(None, "\"id\" is a string or a number");
    }
    if object.remove("jsonrpc").is_none_or(|version| version != "2.0") {
        return refused(id.as_ref(), "\"jsonrpc\" must be \"2.0\"");
    }
    let Some(Value::String(method)) = object.remove("method") else {
        return refused(id.as_ref(), "\"method\" is missing, or is no string");
    };
    let params = match object.remove("params") {
        None => Value::Object(Map::new()),
        Some(params @ Value::Object(_)) => params,
        Some(_) => {
            return refused(id.as_ref(), "\"params\" must be an object: parameters have names");
        }
    };
    if let Some(unknown) = object.keys().next() {
        return refused(id.as_ref(), &format!("{unknown:?} is no part of a request"));
    }
    Ok(Call { id, method, params })
}

fn is_id(id: &Value) -> bool {
    id.is_string() || id.is_number()
}

/// The answer to a request.
pub(super) fn response(id: &Value, outcome: Result<Value, Failure>) -> Value {
    match outcome {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
        Err(Failure { code, message }) => {
            json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message } })
        }
    }
}

/// A message that is not an answer.
pub(super) fn notification(method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "method": method, "params": params })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(value: Value) -> Result<Call, (Value, Failure)> {
        match value {
            Value::Object(object) => parse(object),
            _ => panic!("an object"),
        }
    }

    #[test]
    fn requests_and_notifications_are_told_apart() {
        let call = parsed(json!({ "jsonrpc": "2.0", "id": 7, "method": "disk.list" }));
        let call = call.expect("a request");
        assert_eq!((call.id, call.params), (Some(json!(7)), json!({})));
        let call = parsed(json!({ "jsonrpc": "2.0", "method": "x", "params": { "a": 1 } }));
        assert_eq!(call.expect("a notification").id, None);
    }

    #[test]
    fn what_is_no_request_is_refused_with_the_id_that_it_has() {
        for (value, id, why) in [
            (json!({ "id": 7, "method": "x" }), json!(7), "jsonrpc"),
            (json!({ "jsonrpc": "1.0", "id": "a", "method": "x" }), json!("a"), "jsonrpc"),
            (json!({ "jsonrpc": "2.0", "id": 7 }), json!(7), "method"),
            (json!({ "jsonrpc": "2.0", "id": 7, "method": 1 }), json!(7), "method"),
            (json!({ "jsonrpc": "2.0", "id": [], "method": "x" }), Value::Null, "id"),
            (json!({ "jsonrpc": "2.0", "id": 7, "method": "x", "params": [1] }), json!(7), "names"),
            (json!({ "jsonrpc": "2.0", "id": 7, "method": "x", "more": 1 }), json!(7), "\"more\""),
        ] {
            let (found, failure) = parsed(value.clone()).expect_err("it is none");
            assert!(found == id && failure.message.contains(why), "{value}: {found} {failure:?}");
        }
    }
}
