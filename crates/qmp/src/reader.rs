//! Messages of QMP: JSON values, one after the other, which need not be on lines of their own.
//!
//! Guarantees: a message has at most [`MAX_MESSAGE`] bytes and [`MAX_NESTING`] levels. Bytes that
//! are not JSON are an error; the reader then continues with the next message. A message past these
//! limits is the last one, because the reader cannot tell where it ends: the rest of it must not be
//! read as commands. The error texts are QEMU's.

use std::collections::VecDeque;

use serde_json::{Map, Number, Value};

use super::tokens::{Lexed, Lexer, MAX_TEXT, Token};

/// The maximum number of bytes in a message.
pub(super) const MAX_MESSAGE: usize = 4 * MAX_TEXT;
/// The maximum number of nested lists and objects.
const MAX_NESTING: usize = 128;

/// A value, or the reason why the bytes are not a value.
pub(super) type Message = Result<Value, String>;

/// Parses bytes into messages.
#[derive(Default)]
pub(super) struct Reader {
    lexer: Lexer,
    tokens: VecDeque<Token>,
    braces: i64,
    brackets: i64,
    /// Bytes since the message began.
    length: usize,
    /// Whether a message was past the limits.
    is_over: bool,
    /// Messages that the caller has not taken.
    messages: VecDeque<Message>,
}

impl Reader {
    /// Takes bytes up to the first that ends a message. Returns the count of bytes taken.
    pub(super) fn take(&mut self, bytes: &[u8]) -> usize {
        if self.is_over {
            return bytes.len();
        }
        let mut found = Vec::new();
        for (index, byte) in bytes.iter().enumerate() {
            self.lexer.take(*byte, &mut |lexed| found.push(lexed));
            found.drain(..).for_each(|lexed| self.take_lexed(lexed));
            self.count_byte();
            if !self.messages.is_empty() {
                return index + 1;
            }
        }
        bytes.len()
    }

    /// Removes and returns the next message.
    pub(super) fn next(&mut self) -> Option<Message> {
        self.messages.pop_front()
    }

    /// Whether no further message is read.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    fn count_byte(&mut self) {
        let is_inside = !self.tokens.is_empty() || self.lexer.is_inside();
        self.length = if is_inside { self.length + 1 } else { 0 };
        if self.length > MAX_MESSAGE {
            self.end("JSON token size limit exceeded");
        }
    }

    fn take_lexed(&mut self, lexed: Lexed) {
        let token = match lexed {
            Lexed::Stray(text) => return self.fail(format!("JSON parse error, stray '{text}'")),
            Lexed::TooLong => return self.end("JSON token size limit exceeded"),
            Lexed::Token(token) => token,
        };
        match token {
            Token::Mark(b'{') => self.braces += 1,
            Token::Mark(b'}') => self.braces -= 1,
            Token::Mark(b'[') => self.brackets += 1,
            Token::Mark(b']') => self.brackets -= 1,
            _ => {}
        }
        if self.braces + self.brackets > MAX_NESTING as i64 {
            return self.end("JSON nesting depth limit exceeded");
        }
        self.tokens.push_back(token);
        let is_open = self.braces > 0 || self.brackets > 0;
        if is_open && self.braces >= 0 && self.brackets >= 0 {
            return;
        }
        let value = parse(&mut self.tokens);
        let message = value.map_err(|why| format!("JSON parse error, {why}"));
        self.reset();
        self.messages.push_back(message);
    }

    fn fail(&mut self, why: String) {
        self.reset();
        self.messages.push_back(Err(why));
    }

    /// A message is past a limit.
    fn end(&mut self, why: &str) {
        self.is_over = true;
        self.fail(why.to_owned());
    }

    fn reset(&mut self) {
        self.tokens = VecDeque::new();
        (self.braces, self.brackets, self.length) = (0, 0, 0);
    }
}

/// All messages in bytes that arrive in pieces.
pub fn read_all<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Message> {
    let (mut reader, mut messages) = (Reader::default(), Vec::new());
    for mut piece in pieces {
        while !piece.is_empty() {
            let taken = reader.take(piece);
            piece = &piece[taken..];
            messages.extend(std::iter::from_fn(|| reader.next()));
        }
    }
    messages
}

/// Parses tokens as one value.
fn parse(tokens: &mut VecDeque<Token>) -> Result<Value, String> {
    let value = parse_value(tokens)?;
    if tokens.is_empty() { Ok(value) } else { Err("expecting value".into()) }
}

fn parse_value(tokens: &mut VecDeque<Token>) -> Result<Value, String> {
    match tokens.pop_front() {
        Some(Token::Text(text)) => Ok(Value::String(text?)),
        Some(Token::Number(text)) => parse_number(&text),
        Some(Token::Keyword(word)) => match word.as_str() {
            "true" => Ok(Value::Bool(true)),
            "false" => Ok(Value::Bool(false)),
            "null" => Ok(Value::Null),
            _ => Err(format!("invalid keyword '{word}'")),
        },
        Some(Token::Mark(b'[')) => parse_list(tokens),
        Some(Token::Mark(b'{')) => parse_object(tokens),
        Some(Token::Mark(_)) => Err("expecting value".into()),
        None => Err("premature EOI".into()),
    }
}

fn parse_number(text: &str) -> Result<Value, String> {
    if let Ok(number) = text.parse::<i64>() {
        return Ok(number.into());
    }
    if let Ok(number) = text.parse::<u64>() {
        return Ok(number.into());
    }
    // A number that is too large for a double cannot be represented.
    let number = text.parse().ok().and_then(Number::from_f64);
    number.map(Value::Number).ok_or_else(|| "invalid number".into())
}

fn parse_list(tokens: &mut VecDeque<Token>) -> Result<Value, String> {
    let mut list = Vec::new();
    if take_mark(tokens, b']') {
        return Ok(Value::Array(list));
    }
    loop {
        list.push(parse_value(tokens)?);
        if take_mark(tokens, b']') {
            return Ok(Value::Array(list));
        }
        if !take_mark(tokens, b',') {
            return Err("expected separator in list".into());
        }
    }
}

fn parse_object(tokens: &mut VecDeque<Token>) -> Result<Value, String> {
    let mut object = Map::new();
    if take_mark(tokens, b'}') {
        return Ok(Value::Object(object));
    }
    loop {
        let Value::String(key) = parse_value(tokens)? else {
            return Err("key is not a string in object".into());
        };
        if !take_mark(tokens, b':') {
            return Err("missing : in object pair".into());
        }
        let value = parse_value(tokens)?;
        if object.insert(key, value).is_some() {
            return Err("duplicate key".into());
        }
        if take_mark(tokens, b'}') {
            return Ok(Value::Object(object));
        }
        if !take_mark(tokens, b',') {
            return Err("expected separator in dict".into());
        }
    }
}

fn take_mark(tokens: &mut VecDeque<Token>, mark: u8) -> bool {
    let is_next = tokens.front() == Some(&Token::Mark(mark));
    if is_next {
        tokens.pop_front();
    }
    is_next
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use serde_json::json;

    use super::*;

    /// All messages in bytes that arrive in pieces of `piece` bytes.
    fn read(bytes: &[u8], piece: usize) -> Vec<Message> {
        let (mut reader, mut messages) = (Reader::default(), Vec::new());
        for mut piece in bytes.chunks(piece) {
            while !piece.is_empty() {
                piece = &piece[reader.take(piece)..];
                messages.extend(std::iter::from_fn(|| reader.next()));
            }
        }
        messages
    }

    #[test]
    fn values_are_found_without_lines_and_in_any_pieces() {
        let bytes = br#" {"a":1}{'b' : [true,null,-2.5e1,"\u00e9\ud83d\ude00\n'"]}
            'x' [] 18446744073709551615 "#;
        let whole = read(bytes, usize::MAX);
        let wanted = [
            json!({ "a": 1 }),
            json!({ "b": [true, null, -25.0, "\u{e9}\u{1f600}\n'"] }),
            json!("x"),
            json!([]),
            json!(u64::MAX),
        ];
        assert_eq!(whole, wanted.map(Ok));
        (1..bytes.len()).for_each(|piece| assert_eq!(read(bytes, piece), whole));
    }

    #[test]
    fn what_is_no_json_is_told_in_words_of_qemu_and_what_follows_is_read() {
        for (text, why) in [
            ("}", "expecting value"),
            ("{'a' 1}", "missing : in object pair"),
            ("{'a':1,'a':2}", "duplicate key"),
            ("{'a':1,}", "expecting value"),
            ("{1:2}", "key is not a string in object"),
            ("[1 2]", "expected separator in list"),
            ("tru ", "invalid keyword 'tru'"),
            ("'\\x'", "invalid escape sequence in string"),
            ("'\\ud800'", "invalid escape sequence in string"),
            ("'\\ud800\\u0041'", "invalid escape sequence in string"),
            ("'\\u12'", "invalid escape sequence in string"),
            ("1e999 ", "invalid number"),
        ] {
            let messages = read(format!("{text}{{'b':1}}").as_bytes(), 1);
            assert_eq!(messages[0], Err(format!("JSON parse error, {why}")), "{text}");
            assert_eq!(messages.last(), Some(&Ok(json!({ "b": 1 }))), "{text}");
        }
        for text in [&b"\xff{'b':1}"[..], b"{'a':'\x01 ,{'b':1}", b"01 {'b':1}", b"1.e {'b':1}"] {
            let messages = read(text, 1);
            let stray = messages[0].as_ref().expect_err("no JSON");
            assert!(stray.starts_with("JSON parse error, stray '"), "{stray}");
            assert_eq!(messages.last(), Some(&Ok(json!({ "b": 1 }))));
        }
        assert!(read(b"'\xe9'", 1)[0].as_ref().is_err_and(|why| why.contains("UTF-8")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_messages_or_errors_whatever_the_pieces(
            words in vec(
                select(&["{", "}", "[", "]", ":", ",", "'a'", "\"b\"", "'", "\\u00e9", "-1", "0.5", "true", "x", " ", "\n", "\x01"][..]),
                0..64,
            ),
            other in vec(any::<u8>(), 0..8),
            piece in 1..9_usize,
        ) {
            let bytes: Vec<u8> = words.concat().into_bytes().into_iter().chain(other).collect();
            prop_assert_eq!(read(&bytes, piece), read(&bytes, usize::MAX));
            // A value of standard JSON is parsed as serde_json parses it.
            if let Ok(value @ (Value::Object(_) | Value::Array(_))) = serde_json::from_slice(&bytes) {
                let messages = read(&bytes, piece);
                prop_assert!(messages == [Ok(value)] || messages[0].as_ref().is_err_and(|why| why.contains("duplicate")));
            }
        }
    }

    #[test]
    fn lengths_and_depths_have_limits() {
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(read(deep(MAX_NESTING).as_bytes(), 7)[0].is_ok());
        let messages = read(deep(MAX_NESTING + 1).as_bytes(), 7);
        assert_eq!(messages[0], Err("JSON nesting depth limit exceeded".into()));
        for long in [
            "'".to_owned() + &"x".repeat(5 * MAX_MESSAGE),
            "[".to_owned() + &"1,".repeat(MAX_MESSAGE),
        ] {
            let mut reader = Reader::default();
            let mut bytes = long.as_bytes();
            let mut most = 0;
            let mut failed = false;
            while !bytes.is_empty() {
                bytes = &bytes[reader.take(bytes)..];
                most = most.max(reader.tokens.len() + reader.lexer.is_inside() as usize);
                failed |= reader.next().is_some_and(|message| message.is_err());
            }
            assert!(failed && most <= MAX_MESSAGE + 1 && reader.is_over());
        }
    }
}
