//! As much of HTTP/1.1 as a scrape takes: one GET or HEAD on a connection, which is then closed.
//!
//! Guarantees: what is not such a request gets an answer that says what is, whatever its bytes; nothing of it is kept.

use super::text::Form;

/// The most bytes of a request, up to the empty line that ends it.
pub const MAX_REQUEST: usize = 8 << 10;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// `/metrics`.
    Text(Form),
    /// `/metrics.json`.
    Json,
}

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub resource: Resource,
    /// Whether the answer is to have its bytes, or only say how many there would be (HEAD).
    pub wants_body: bool,
}

/// A request that cannot be answered: a status and a line for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    status: &'static str,
    why: &'static str,
}

const BAD: Refusal = Refusal { status: "400 Bad Request", why: "not an HTTP request" };
const TOO_LONG: Refusal = Refusal {
    status: "431 Request Header Fields Too Large",
    why: "a request has at most 8192 bytes here",
};
const NOT_FOUND: Refusal =
    Refusal { status: "404 Not Found", why: "there are /metrics and /metrics.json" };
const METHOD: Refusal =
    Refusal { status: "405 Method Not Allowed", why: "only GET and HEAD are answered" };

/// Reads a request; `None` where its end has not been received.
///
/// # Errors
/// What cannot be answered.
pub fn parse(received: &[u8]) -> Result<Option<Request>, Refusal> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        // Something that is no HTTP need not be waited for.
        if !may_be_request(received) {
            return Err(BAD);
        }
        return if received.len() > MAX_REQUEST { Err(TOO_LONG) } else { Ok(None) };
    };
    if end > MAX_REQUEST {
        return Err(TOO_LONG);
    }
    let head = std::str::from_utf8(&received[..end]).map_err(|_| BAD)?;
    let mut lines = head.split("\r\n");
    let words: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Err(BAD) };
    if !version.starts_with("HTTP/1.") {
        return Err(BAD);
    }
    let wants_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return Err(METHOD),
    };
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let resource = match path {
        "/metrics" => Resource::Text(form(lines)),
        "/metrics.json" => Resource::Json,
        _ => return Err(NOT_FOUND),
    };
    Ok(Some(Request { resource, wants_body }))
}

/// OpenMetrics if that is accepted, as Prometheus asks for; else the text that any tool reads.
fn form<'a>(mut headers: impl Iterator<Item = &'a str>) -> Form {
    let accepts = headers.any(|header| {
        let (name, value) = header.split_once(':').unwrap_or_default();
        name.eq_ignore_ascii_case("accept") && value.contains("application/openmetrics-text")
    });
    if accepts { Form::OpenMetrics } else { Form::Prometheus }
}

/// Whether bytes can be the beginning of a request.
fn may_be_request(received: &[u8]) -> bool {
    let method = received.split(|byte| *byte == b' ').next().unwrap_or_default();
    method.len() <= 16 && method.iter().all(u8::is_ascii_uppercase)
}

/// The answer to a request.
pub fn answer(content_type: &str, body: &str, wants_body: bool) -> Vec<u8> {
    with_head("200 OK", content_type, body, wants_body)
}

/// The answer to what cannot be answered.
pub fn refuse(refusal: Refusal) -> Vec<u8> {
    let body = format!("{}\n", refusal.why);
    with_head(refusal.status, "text/plain; charset=utf-8", &body, true)
}

fn with_head(status: &str, content_type: &str, body: &str, wants_body: bool) -> Vec<u8> {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    let body = if wants_body { body } else { "" };
    [head.as_bytes(), body.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn get(resource: Resource) -> Result<Option<Request>, Refusal> {
        Ok(Some(Request { resource, wants_body: true }))
    }

    #[test]
    fn what_scrapers_send_is_understood() {
        let old = Resource::Text(Form::Prometheus);
        let new = Resource::Text(Form::OpenMetrics);
        let accept = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\nACCEPT: a/b,application/openmetrics-text;version=1.0.0\r\n\r\n";
        assert_eq!(parse(accept), get(new));
        assert_eq!(parse(b"GET /metrics HTTP/1.0\r\n\r\n"), get(old));
        assert_eq!(parse(b"GET /metrics.json HTTP/1.1\r\n\r\nGET"), get(Resource::Json));
        let head = Request { resource: old, wants_body: false };
        assert_eq!(parse(b"HEAD /metrics HTTP/1.1\r\n\r\n"), Ok(Some(head)));
    }

    #[test]
    fn what_is_none_is_refused_by_its_kind() {
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".as_slice(), &[b'a'; MAX_REQUEST]].concat();
        let cases: [(&[u8], Refusal); 9] = [
            (b"POST /metrics HTTP/1.1\r\n\r\n", METHOD),
            (b"GET / HTTP/1.1\r\n\r\n", NOT_FOUND),
            (b"GET /../metrics HTTP/1.1\r\n\r\n", NOT_FOUND),
            (b"GET /metrics\r\n\r\n", BAD),
            (b"GET  /metrics HTTP/1.1\r\n\r\n", BAD),
            (b"GET /metrics HTTP/2\r\n\r\n", BAD),
            (b"GET /\xff HTTP/1.1\r\n\r\n", BAD),
            (b"\x16\x03\x01\x02\x00", BAD),
            (&long, TOO_LONG),
        ];
        for (bytes, refusal) in cases {
            assert_eq!(parse(bytes), Err(refusal), "{:?}", bytes.escape_ascii().to_string());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"GET /metrics".as_slice(), &bytes, b"\r\n\r\n"].concat());
        }

        #[test]
        fn a_request_is_the_same_in_whatever_pieces_it_arrives(cut in 0..42_usize) {
            let whole = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
            let cut = cut.min(whole.len() - 1);
            prop_assert_eq!(parse(&whole[..cut]), Ok(None));
        }
    }
}
