//! The arguments of a command: the command reads each by its name and type, and an unread one is an
//! error. The error texts are QEMU's.

use blockhouse_config::switch;
use blockhouse_daemon::Name;
use serde_json::{Map, Value};

use super::errors::QmpError;

/// The keys of names of new nodes.
const NODE_KEYS: [&str; 2] = ["node-name", "snapshot-node-name"];

/// The arguments of a command, or an object in them.
#[derive(Debug)]
pub(super) struct Arguments {
    given: Map<String, Value>,
    /// The prefix of names in errors.
    path: String,
    /// Whether the values are texts of a command line, in which numbers and switches (`on`, `off`)
    /// are texts too.
    are_words: bool,
    /// Whether the arguments come from a command-line option.
    is_option: bool,
}

impl Arguments {
    /// The arguments of a command.
    pub(super) fn new(given: Map<String, Value>) -> Self {
        Self { given, path: String::new(), are_words: false, is_option: false }
    }

    /// The arguments of a command, from a command-line option. `are_words`: switches are `on` and
    /// `off`, and numbers are texts.
    pub(super) fn of_option(given: Map<String, Value>, are_words: bool) -> Self {
        Self { are_words, is_option: true, ..Self::new(given) }
    }

    /// Whether the arguments come from a command-line option.
    pub(super) fn is_option(&self) -> bool {
        self.is_option
    }

    /// The object with the parts of an address: its member `data`, or in a command-line option the
    /// address itself.
    pub(super) fn parts_of_address(self) -> Result<Self, QmpError> {
        let mut address = self;
        if address.is_option {
            return Ok(address);
        }
        let parts = address.object("data")?;
        address.end()?;
        Ok(parts)
    }

    fn taken<T>(
        &mut self,
        name: &str,
        kind: &str,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<Option<T>, QmpError> {
        let Some(value) = self.given.remove(name) else { return Ok(None) };
        let path = &self.path;
        let wrong = || {
            QmpError::generic(format!(
                "Invalid parameter type for '{path}{name}', expected: {kind}"
            ))
        };
        read(value).map(Some).ok_or_else(wrong)
    }

    fn needed<T>(&self, name: &str, taken: Option<T>) -> Result<T, QmpError> {
        taken
            .ok_or_else(|| QmpError::generic(format!("Parameter '{}{name}' is missing", self.path)))
    }

    /// A text that may be left out.
    pub(super) fn some_text(&mut self, name: &str) -> Result<Option<String>, QmpError> {
        self.taken(name, "string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })
    }

    /// A text that must be given.
    pub(super) fn text(&mut self, name: &str) -> Result<String, QmpError> {
        let text = self.some_text(name)?;
        self.needed(name, text)
    }

    /// A boolean; `otherwise` if it is left out.
    pub(super) fn flag(&mut self, name: &str, otherwise: bool) -> Result<bool, QmpError> {
        if self.are_words {
            let Some(word) = self.some_text(name)? else { return Ok(otherwise) };
            let path = &self.path;
            return switch::parse(&word).ok_or_else(|| {
                QmpError::generic(format!("Parameter '{path}{name}' expects 'on' or 'off'"))
            });
        }
        let flag = self.taken(name, "boolean", |value| value.as_bool())?;
        Ok(flag.unwrap_or(otherwise))
    }

    /// A boolean that must be given.
    pub(super) fn needed_flag(&mut self, name: &str) -> Result<bool, QmpError> {
        self.needed(name, self.given.contains_key(name).then_some(()))?;
        self.flag(name, false)
    }

    /// A number that may be left out.
    pub(super) fn some_integer(&mut self, name: &str) -> Result<Option<i64>, QmpError> {
        let are_words = self.are_words;
        self.taken(name, "integer", |value| {
            if let Some(word) = value.as_str().filter(|_| are_words) {
                return word.parse().ok();
            }
            // QEMU accepts whole numbers in any notation.
            let double = value
                .as_f64()
                .filter(|double| double.fract() == 0.0 && double.abs() < 2f64.powi(53));
            value.as_i64().or(double.map(|double| double as i64))
        })
    }

    /// A number that may be left out, and is not below zero.
    pub(super) fn some_unsigned(&mut self, name: &str) -> Result<Option<u64>, QmpError> {
        let number = self.some_integer(name)?;
        number
            .map(|number| number.try_into().map_err(|_| self.rejects(name, &number.to_string())))
            .transpose()
    }

    /// A number that must be given, and is not below zero.
    pub(super) fn needed_unsigned(&mut self, name: &str) -> Result<u64, QmpError> {
        let number = self.some_unsigned(name)?;
        self.needed(name, number)
    }

    /// A number that must be given.
    pub(super) fn integer(&mut self, name: &str) -> Result<i64, QmpError> {
        let number = self.some_integer(name)?;
        self.needed(name, number)
    }

    /// A list that may be left out.
    pub(super) fn some_list(&mut self, name: &str) -> Result<Option<Vec<Value>>, QmpError> {
        self.taken(name, "array", |value| match value {
            Value::Array(list) => Some(list),
            _ => None,
        })
    }

    /// A list that must be given.
    pub(super) fn list(&mut self, name: &str) -> Result<Vec<Value>, QmpError> {
        let list = self.some_list(name)?;
        self.needed(name, list)
    }

    /// An object that may be left out.
    pub(super) fn some_object(&mut self, name: &str) -> Result<Option<Self>, QmpError> {
        let object = self.taken(name, "object", |value| match value {
            Value::Object(object) => Some(object),
            _ => None,
        })?;
        let path = format!("{}{name}.", self.path);
        let Self { are_words, is_option, .. } = *self;
        Ok(object.map(|given| Self { given, path, are_words, is_option }))
    }

    /// An object that must be given.
    pub(super) fn object(&mut self, name: &str) -> Result<Self, QmpError> {
        let object = self.some_object(name)?;
        self.needed(name, object)
    }

    /// An object that may be left out. A text instead of an object stays in the arguments, and the
    /// result is `None`.
    pub(super) fn some_object_or_text(&mut self, name: &str) -> Result<Option<Self>, QmpError> {
        match self.given.get(name) {
            Some(Value::String(_)) => Ok(None),
            _ => self.some_object(name),
        }
    }

    /// An object that is element `index` of the list `name`.
    pub(super) fn element(name: &str, index: usize, value: Value) -> Result<Self, QmpError> {
        match value {
            Value::Object(given) => {
                Ok(Self { path: format!("{name}[{index}]."), ..Self::new(given) })
            }
            _ => Err(QmpError::generic(format!(
                "Invalid parameter type for '{name}[{index}]', expected: object"
            ))),
        }
    }

    /// One of the given words; `None` if it is left out.
    pub(super) fn word(
        &mut self,
        name: &str,
        words: &[&'static str],
    ) -> Result<Option<&'static str>, QmpError> {
        let Some(text) = self.some_text(name)? else { return Ok(None) };
        let known = words.iter().find(|word| **word == text);
        known.copied().map(Some).ok_or_else(|| self.rejects(name, &text))
    }

    /// One of the given words; it must be given.
    pub(super) fn needed_word(
        &mut self,
        name: &str,
        words: &[&'static str],
    ) -> Result<&'static str, QmpError> {
        let word = self.word(name, words)?;
        self.needed(name, word)
    }

    /// The error names the parameter without its path, as QEMU's error does.
    fn rejects(&self, name: &str, value: &str) -> QmpError {
        QmpError::generic(format!("Parameter '{name}' does not accept value '{value}'"))
    }

    /// Takes an argument that has no effect here, and refuses all its values except these.
    pub(super) fn only(&mut self, name: &str, values: &[Value], why: &str) -> Result<(), QmpError> {
        match self.given.remove(name) {
            Some(value) if !values.contains(&self.typed(value.clone())) => Err(QmpError::generic(
                format!("Parameter '{}{name}' is not possible here: {why}", self.path),
            )),
            _ => Ok(()),
        }
    }

    /// A value of any type; the texts `on` and `off` of a command line become booleans.
    fn typed(&self, value: Value) -> Value {
        let switch = value.as_str().filter(|_| self.are_words).and_then(switch::parse);
        switch.map_or(value, Value::Bool)
    }

    /// Puts a text back into the arguments, so that it can be taken again.
    pub(super) fn put_back(&mut self, name: &str, text: &str) {
        self.given.insert(name.to_owned(), text.into());
    }

    /// An argument, which stays in the arguments.
    pub(super) fn peek(&self, name: &str) -> Option<&Value> {
        self.given.get(name)
    }

    /// Whether an argument is present and null. Takes it if so.
    pub(super) fn is_null(&mut self, name: &str) -> bool {
        let is_null = self.given.get(name) == Some(&Value::Null);
        if is_null {
            self.given.remove(name);
        }
        is_null
    }

    /// The names of new nodes in the arguments, at any depth.
    pub(super) fn nodes(&self) -> Vec<Name> {
        fn add(value: &Value, names: &mut Vec<Name>) {
            match value {
                Value::Object(given) => add_all(given, names),
                Value::Array(values) => values.iter().for_each(|value| add(value, names)),
                _ => {}
            }
        }
        fn add_all(given: &Map<String, Value>, names: &mut Vec<Name>) {
            let named = NODE_KEYS.iter().filter_map(|key| given.get(*key)?.as_str());
            names.extend(named.map(|node| Name::Node(node.to_owned())));
            given.values().for_each(|value| add(value, names));
        }
        let mut names = Vec::new();
        add_all(&self.given, &mut names);
        names
    }

    /// Takes all arguments that were not taken.
    pub(super) fn rest(&mut self) -> Map<String, Value> {
        std::mem::take(&mut self.given)
    }

    /// Refuses arguments that were not taken.
    pub(super) fn end(&self) -> Result<(), QmpError> {
        match self.given.keys().next() {
            Some(name) => {
                Err(QmpError::generic(format!("Parameter '{}{name}' is unexpected", self.path)))
            }
            None => Ok(()),
        }
    }
}

/// Whether QEMU accepts this as an id.
pub(super) fn is_well_formed(id: &str) -> bool {
    let is_letter = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    id.starts_with(|c: char| c.is_ascii_alphabetic()) && id.bytes().all(is_letter)
}
