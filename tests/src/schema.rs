//! The subset of JSON Schema that the schema of the control socket uses: checks values, and makes
//! random values that fit.

use fastrand::Rng;
use serde_json::{Map, Value, json};

/// A schema with its definitions.
#[derive(Clone, Copy)]
pub struct Schema<'a> {
    root: &'a Value,
    at: &'a Value,
}

impl<'a> Schema<'a> {
    /// The part of `root` at a JSON pointer.
    ///
    /// # Panics
    /// When the pointer leads nowhere.
    pub fn of(root: &'a Value, pointer: &str) -> Self {
        let at = root.pointer(pointer).unwrap_or_else(|| panic!("{pointer}: not in the schema"));
        Self { root, at }.resolved()
    }

    fn to(self, at: &'a Value) -> Self {
        Self { at, ..self }.resolved()
    }

    fn resolved(self) -> Self {
        match self.at.get("$ref").and_then(Value::as_str) {
            Some(reference) => Self::of(self.root, reference.trim_start_matches('#')),
            None => self,
        }
    }

    fn list(self, key: &str) -> impl Iterator<Item = &'a Value> {
        self.at.get(key).and_then(Value::as_array).into_iter().flatten()
    }

    fn alternatives(self) -> Vec<Self> {
        let all = ["anyOf", "oneOf"].into_iter().flat_map(|key| self.list(key));
        all.map(|at| self.to(at)).collect()
    }

    /// The types that the schema allows; empty if it does not restrict them.
    fn types(self) -> Vec<&'a str> {
        match self.at.get("type") {
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        }
    }

    fn properties(self) -> impl Iterator<Item = (&'a String, Self)> {
        let properties = self.at.get("properties").and_then(Value::as_object);
        properties.into_iter().flatten().map(move |(name, at)| (name, self.to(at)))
    }

    fn is_required(self, name: &str) -> bool {
        self.list("required").any(|required| required == name)
    }

    /// Why a value does not fit; `None` if it does.
    pub fn misfit(self, value: &Value) -> Option<String> {
        let alternatives = self.alternatives();
        if !alternatives.is_empty() && alternatives.iter().all(|one| one.misfit(value).is_some()) {
            return Some(format!("{value}: none of the alternatives"));
        }
        let types = self.types();
        if !types.is_empty() && !types.iter().any(|name| is_of_type(value, name)) {
            return Some(format!("{value}: not of type {types:?}"));
        }
        if self.at.get("const").is_some_and(|only| only != value) {
            return Some(format!("{value}: not {}", self.at["const"]));
        }
        if self.at.get("enum").is_some() && !self.list("enum").any(|one| one == value) {
            return Some(format!("{value}: none of {}", self.at["enum"]));
        }
        if self.at.get("minimum").is_some() && value.as_f64() < self.at["minimum"].as_f64() {
            return Some(format!("{value}: less than {}", self.at["minimum"]));
        }
        if let (Some(items), Some(elements)) = (self.at.get("items"), value.as_array()) {
            return elements.iter().find_map(|element| self.to(items).misfit(element));
        }
        value.as_object().and_then(|object| self.misfit_of_object(object))
    }

    fn misfit_of_object(self, object: &Map<String, Value>) -> Option<String> {
        let missing = self.list("required").filter_map(Value::as_str);
        if let Some(name) = missing.into_iter().find(|name| !object.contains_key(*name)) {
            return Some(format!("{name} is missing"));
        }
        let is_closed = self.at.get("additionalProperties") == Some(&Value::Bool(false));
        let is_known = |name: &String| self.properties().any(|(known, _)| known == name);
        if let Some(name) = object.keys().find(|name| is_closed && !is_known(name)) {
            return Some(format!("{name} is unknown"));
        }
        self.properties().find_map(|(name, schema)| schema.misfit(object.get(name)?))
    }

    /// A random value that fits. `make` may return a value for a property by its name.
    pub fn random(
        self,
        random: &mut Rng,
        make: &impl Fn(&str, &mut Rng) -> Option<Value>,
    ) -> Value {
        self.random_of("", random, make)
    }

    fn random_of(
        self,
        name: &str,
        random: &mut Rng,
        make: &impl Fn(&str, &mut Rng) -> Option<Value>,
    ) -> Value {
        if let Some(value) = make(name, random).filter(|value| self.misfit(value).is_none()) {
            return value;
        }
        if let Some(only) = self.at.get("const") {
            return only.clone();
        }
        if let Some(one) = random.choice(self.list("enum").collect::<Vec<_>>()) {
            return one.clone();
        }
        if let Some(one) = random.choice(self.alternatives()) {
            return one.random_of(name, random, make);
        }
        match random.choice(self.types()) {
            Some("object") => {
                let mut object = Map::new();
                for (name, schema) in self.properties() {
                    if self.is_required(name) || random.bool() {
                        object.insert(name.clone(), schema.random_of(name, random, make));
                    }
                }
                Value::Object(object)
            }
            Some("array") => {
                let items = self.at.get("items").map(|items| self.to(items));
                let count = if items.is_some() { random.usize(..3) } else { 0 };
                let element = |_| items.map(|items| items.random_of(name, random, make));
                Value::Array((0..count).filter_map(element).collect())
            }
            Some("boolean") => json!(random.bool()),
            Some("integer") => json!(random.u64(..) >> random.u32(..64)),
            Some("number") => json!(random.f64()),
            Some("null") | None => Value::Null,
            Some(_) => json!(random.alphanumeric().to_string()),
        }
    }
}

fn is_of_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => false,
    }
}
