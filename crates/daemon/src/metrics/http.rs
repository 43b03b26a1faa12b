//! The part of HTTP/1.1 that a scrape and the page need: one GET or HEAD on a connection, which is
//! then closed.
//!
//! Guarantees: any other request is refused with a reply that gives the reason. A page of another
//! site cannot read a reply, neither by DNS rebinding nor by a script, an image or a frame.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::text::Form;

/// The maximum number of bytes in a request, up to the empty line that ends it.
pub const MAX_REQUEST: usize = 8 << 10;

/// The resource that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// `/metrics`, in this text format.
    Text(Form),
    /// `/metrics.json`, the metrics as JSON.
    Json,
    /// A file of the page.
    Page(&'static PageFile),
    /// `/events`, the event stream of the page.
    Events,
}

/// A file of the page.
#[derive(Debug, PartialEq, Eq)]
pub struct PageFile {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

/// The files of the page at `/`. The page gets its figures from `/events`.
const PAGE: [&PageFile; 3] = [
    &PageFile {
        path: "/",
        content_type: "text/html; charset=utf-8",
        text: include_str!("page/index.html"),
    },
    &PageFile {
        path: "/page.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("page/page.css"),
    },
    &PageFile {
        path: "/page.js",
        content_type: "text/javascript; charset=utf-8",
        text: include_str!("page/page.js"),
    },
];

/// With these headers, a browser runs only the page's own script and style, and does not show the
/// page in a frame of another page.
const HEADERS: &str = "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
    Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\nConnection: close\r\n";

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The resource that it asks for.
    pub resource: Resource,
    /// Whether the reply has the body (GET), or only its length (HEAD).
    pub wants_body: bool,
}

/// The refusal of a request: the HTTP status, and the reason in one line.
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
const NOT_FOUND: Refusal = Refusal {
    status: "404 Not Found",
    why: "there are a page at /, /metrics, /metrics.json and /events",
};
const OTHER_SITE: Refusal =
    Refusal { status: "403 Forbidden", why: "a page of another site asks for this" };
/// The refusal when the maximum number of streams is reached.
pub const TOO_MANY: Refusal = Refusal {
    status: "503 Service Unavailable",
    why: "too many pages of this server are open: close one",
};
const OTHER_HOST: Refusal = Refusal {
    status: "421 Misdirected Request",
    why: "metrics are told to this machine: ask for localhost, 127.0.0.1 or [::1]",
};
const METHOD: Refusal =
    Refusal { status: "405 Method Not Allowed", why: "only GET and HEAD are answered" };

/// The host names that a request may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Any name: browsers cannot connect to the Unix socket.
    Any,
    /// Only names of the loopback addresses, against DNS rebinding: if another site's name
    /// resolves to this machine, requests of that site's page have that name in `Host`.
    Loopback,
}

impl Hosts {
    fn have(self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
            _ => host,
        };
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let is_address = match address {
            Some(address) => address.parse().is_ok_and(|ip: Ipv6Addr| ip.is_loopback()),
            None => name.parse().is_ok_and(|ip: Ipv4Addr| ip.is_loopback()),
        };
        self == Self::Any || is_address || name.eq_ignore_ascii_case("localhost")
    }
}

/// Parses a request to one of these host names; `None` if the end of the request has not been
/// received.
///
/// # Errors
/// The reply with which the request must be refused.
pub fn parse(received: &[u8], hosts: Hosts) -> Result<Option<Request>, Refusal> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        // Bytes that cannot begin a request are refused without waiting for more.
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
    let values = |name: &'static str| {
        let headers = lines.clone().filter_map(|header| header.split_once(':'));
        let named = headers.filter(move |(other, _)| other.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.trim())
    };
    if !values("host").all(|host| hosts.have(host)) {
        return Err(OTHER_HOST);
    }
    // In this header, browsers say whether a page of another site makes the request.
    let is_of_other_site =
        values("sec-fetch-site").any(|site| !matches!(site, "same-origin" | "none"));
    let wants_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return Err(METHOD),
    };
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let resource = match path {
        "/metrics" => Resource::Text(form(values("accept"))),
        "/metrics.json" => Resource::Json,
        "/events" => Resource::Events,
        _ => Resource::Page(PAGE.iter().find(|file| file.path == path).ok_or(NOT_FOUND)?),
    };
    // The page itself has no figures, so other sites may link to it.
    if is_of_other_site && path != "/" {
        return Err(OTHER_SITE);
    }
    Ok(Some(Request { resource, wants_body }))
}

/// OpenMetrics if the client accepts it (Prometheus does); otherwise the older text format of
/// Prometheus, which more tools can parse.
fn form<'a>(mut accepted: impl Iterator<Item = &'a str>) -> Form {
    let accepts = accepted.any(|types| types.contains("application/openmetrics-text"));
    if accepts { Form::OpenMetrics } else { Form::Prometheus }
}

/// Whether the bytes can be the start of a request.
fn may_be_request(received: &[u8]) -> bool {
    let method = received.split(|byte| *byte == b' ').next().unwrap_or_default();
    method.len() <= 16 && method.iter().all(u8::is_ascii_uppercase)
}

/// The reply with a file of the page.
pub fn page(file: &PageFile, wants_body: bool) -> Vec<u8> {
    with_head("200 OK", file.content_type, file.text, wants_body)
}

/// The head of the reply that streams events. The stream ends when the connection is closed.
pub fn stream_head() -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{HEADERS}\r\n").into_bytes()
}

/// The reply to a request, with this body.
pub fn answer(content_type: &str, body: &str, wants_body: bool) -> Vec<u8> {
    with_head("200 OK", content_type, body, wants_body)
}

/// The reply to a request that is refused.
pub fn refuse(refusal: Refusal) -> Vec<u8> {
    let body = format!("{}\n", refusal.why);
    with_head(refusal.status, "text/plain; charset=utf-8", &body, true)
}

fn with_head(status: &str, content_type: &str, body: &str, wants_body: bool) -> Vec<u8> {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         {allow}{HEADERS}\r\n",
        body.len()
    );
    let body = if wants_body { body } else { "" };
    [head.as_bytes(), body.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<Option<Request>, Refusal> {
        super::parse(bytes, Hosts::Any)
    }

    #[test]
    fn a_page_of_another_site_is_told_nothing() {
        let ask = |host: &str| {
            let request = format!("GET /metrics HTTP/1.1\r\nA: b\r\n{host}\r\n\r\n");
            super::parse(request.as_bytes(), Hosts::Loopback)
        };
        for own in [
            "Host: localhost",
            "host:LOCALHOST:9100",
            "Host: 127.0.0.1:9100",
            "Host: 127.8.0.1",
            "Host: [::1]:9100",
            "Host: [::1]",
            "Accept: x",
        ] {
            assert!(matches!(ask(own), Ok(Some(_))), "{own}");
        }
        for other in [
            "Host: attacker.example",
            "HOST: attacker.example:9100",
            "Host: localhost.attacker.example",
            "Host: 127.0.0.1.attacker.example:80",
            "Host: 10.0.0.1",
            "Host: [fe80::1]:9100",
            "Host:",
            "Host: localhost\r\nHost: attacker.example",
            "Host: localhost:80:attacker",
        ] {
            assert_eq!(ask(other), Err(OTHER_HOST), "{other}");
        }
    }

    #[test]
    fn a_script_of_another_site_reads_nothing() {
        let ask = |path: &str, site: &str| {
            let request = format!("GET {path} HTTP/1.1\r\nSec-Fetch-Site: {site}\r\n\r\n");
            super::parse(request.as_bytes(), Hosts::Loopback)
        };
        for path in ["/metrics", "/metrics.json", "/events", "/page.js"] {
            for own in ["same-origin", "none"] {
                assert!(matches!(ask(path, own), Ok(Some(_))), "{path} {own}");
            }
            for other in ["cross-site", "same-site", "", "none\r\nSec-Fetch-Site: cross-site"] {
                assert_eq!(ask(path, other), Err(OTHER_SITE), "{path} {other}");
            }
        }
        assert_eq!(ask("/", "cross-site"), get(Resource::Page(PAGE[0])));
    }

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
            (b"GET /page HTTP/1.1\r\n\r\n", NOT_FOUND),
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
