//! The lexer of QMP's JSON: the tokens of RFC 8259, and strings in single quotes as in QEMU.
//!
//! The input is a byte stream; a line break is only whitespace. An unexpected byte is reported as
//! an error. As in QEMU, bytes are then skipped up to one of `{}[],:`, 0xfe, 0xff, or a byte below
//! 0x20 that is not a tab. Guarantee: a token has fewer than [`MAX_TEXT`] bytes.

/// A token of this many bytes is rejected.
pub(super) const MAX_TEXT: usize = 64 << 10;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// One of `{}[],:`.
    Mark(u8),
    /// A number, as it was written.
    Number(String),
    /// A word without quotes.
    Keyword(String),
    /// A string, or the reason why it is invalid.
    Text(Result<String, &'static str>),
}

/// An output of the lexer.
#[derive(Debug, PartialEq)]
pub(super) enum Lexed {
    /// A token.
    Token(Token),
    /// Unexpected bytes, or a malformed number.
    Stray(String),
    /// A token has reached [`MAX_TEXT`] bytes.
    TooLong,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum State {
    #[default]
    Between,
    Number,
    Keyword,
    /// Inside of a string that ends with this quote.
    Text(u8),
    /// Inside of a string that ends with this quote, after a backslash.
    Escape(u8),
    /// After an error, while bytes are skipped.
    Recovery,
}

/// Divides bytes into tokens.
#[derive(Default)]
pub(super) struct Lexer {
    state: State,
    /// The token so far, without the quotes around it.
    text: Vec<u8>,
}

impl Lexer {
    /// Whether a token is incomplete.
    pub(super) fn is_inside(&self) -> bool {
        !matches!(self.state, State::Between | State::Recovery)
    }

    /// Takes a byte. A byte may be a token and also end the one before, as the comma in `1,`.
    pub(super) fn take(&mut self, byte: u8, found: &mut impl FnMut(Lexed)) {
        if self.text.len() >= MAX_TEXT {
            self.text.clear();
            self.state = State::Recovery;
            found(Lexed::TooLong);
        }
        match self.state {
            State::Text(quote) => self.take_in_text(byte, quote, found),
            // An escape letter is one byte: `unescape` rejects letters that are not ASCII.
            State::Escape(quote) if byte >= 0x20 => {
                self.text.extend([b'\\', byte]);
                self.state = State::Text(quote);
            }
            State::Escape(_) => self.stray(byte, found),
            State::Number if matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-') => {
                self.text.push(byte);
            }
            State::Keyword if byte.is_ascii_lowercase() => self.text.push(byte),
            State::Number | State::Keyword => {
                self.end(found);
                self.begin(byte, found);
            }
            State::Between => self.begin(byte, found),
            State::Recovery => {
                let is_skipped = matches!(byte, b'\t' | 0x20..=0xfd);
                if !is_skipped || b"{}[],:".contains(&byte) {
                    self.state = State::Between;
                    self.begin(byte, found);
                }
            }
        }
    }

    fn take_in_text(&mut self, byte: u8, quote: u8, found: &mut impl FnMut(Lexed)) {
        match byte {
            _ if byte == quote => self.end(found),
            b'\\' => self.state = State::Escape(quote),
            0x20..=0xfd => self.text.push(byte),
            _ => self.stray(byte, found),
        }
    }

    fn begin(&mut self, byte: u8, found: &mut impl FnMut(Lexed)) {
        self.state = match byte {
            b' ' | b'\t' | b'\r' | b'\n' => State::Between,
            b'{' | b'}' | b'[' | b']' | b',' | b':' => {
                found(Lexed::Token(Token::Mark(byte)));
                State::Between
            }
            b'"' | b'\'' => State::Text(byte),
            b'-' | b'0'..=b'9' => {
                self.text.push(byte);
                State::Number
            }
            b'a'..=b'z' => {
                self.text.push(byte);
                State::Keyword
            }
            _ => return self.stray(byte, found),
        };
    }

    /// Ends a complete token.
    fn end(&mut self, found: &mut impl FnMut(Lexed)) {
        let text = std::mem::take(&mut self.text);
        let plain = |text| String::from_utf8(text).expect("these are letters and digits");
        let token = match self.state {
            State::Number => Token::Number(plain(text)),
            State::Keyword => Token::Keyword(plain(text)),
            _ => Token::Text(unescape(text)),
        };
        self.state = State::Between;
        found(match &token {
            Token::Number(text) if text.parse::<f64>().is_err() || !is_number(text) => {
                Lexed::Stray(text.clone())
            }
            _ => Lexed::Token(token),
        });
    }

    fn stray(&mut self, byte: u8, found: &mut impl FnMut(Lexed)) {
        let mut text = std::mem::take(&mut self.text);
        if let State::Text(quote) | State::Escape(quote) = self.state {
            text.insert(0, quote);
        }
        text.push(byte);
        // An error message shows the last 64 bytes.
        let begin = text.len().saturating_sub(64);
        self.state = State::Recovery;
        found(Lexed::Stray(String::from_utf8_lossy(&text[begin..]).into_owned()));
    }
}

/// Whether a number has the form of JSON. Rust's parser also accepts `01`, `-.5` and `1.`.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text).as_bytes();
    let has_zero = digits.len() > 1 && digits[0] == b'0' && digits[1].is_ascii_digit();
    let is_whole = digits.first().is_some_and(u8::is_ascii_digit);
    let has_fraction =
        text.split('.').skip(1).all(|part| part.starts_with(|c: char| c.is_ascii_digit()));
    is_whole && !has_zero && has_fraction
}

/// Decodes the escapes of a string, which must be UTF-8.
fn unescape(text: Vec<u8>) -> Result<String, &'static str> {
    let text = String::from_utf8(text).map_err(|_| "invalid UTF-8 sequence in string")?;
    if !text.contains('\\') {
        return Ok(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some((before, escape)) = rest.split_once('\\') {
        plain.push_str(before);
        let letter = escape.chars().next().ok_or("invalid escape sequence in string")?;
        rest = &escape[letter.len_utf8()..];
        plain.push(match letter {
            '"' | '\'' | '\\' | '/' => letter,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let (unicode, after) = read_unicode(rest)?;
                rest = after;
                unicode
            }
            _ => return Err("invalid escape sequence in string"),
        });
    }
    plain.push_str(rest);
    Ok(plain)
}

/// Decodes the digits of a `\u` escape, or of a surrogate pair. Also returns the text after it.
fn read_unicode(text: &str) -> Result<(char, &str), &'static str> {
    const WRONG: &str = "invalid escape sequence in string";
    let digits = |text: &str| {
        let digits = text.get(..4).filter(|digits| digits.bytes().all(|c| c.is_ascii_hexdigit()));
        u32::from_str_radix(digits.ok_or(WRONG)?, 16).map_err(|_| WRONG)
    };
    let (first, rest) = (digits(text)?, &text[4..]);
    let (code, rest) = match (first, rest.strip_prefix("\\u")) {
        (0xd800..=0xdbff, Some(second)) => match digits(second)? {
            low @ 0xdc00..=0xdfff => {
                (0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00), &second[4..])
            }
            _ => (first, rest),
        },
        _ => (first, rest),
    };
    // NUL is rejected: QEMU stores it as C0 80, which is not UTF-8.
    char::from_u32(code).filter(|c| *c != '\0').map(|c| (c, rest)).ok_or(WRONG)
}
