//! The schema in the answer of `query-qmp-schema`: makes random arguments of commands, and checks
//! results.

use std::collections::BTreeMap;

use fastrand::Rng;
use serde_json::{Map, Value, json};

/// The maximum depth of random values.
const MAX_DEPTH: usize = 8;

/// Makes a meaningful value for a member by its name; `None` if it knows none.
pub type MakeMember<'a> = &'a dyn Fn(&str, &mut Rng) -> Option<Value>;

/// The entities of a schema, by name.
pub struct QmpSchema(BTreeMap<String, Value>);

impl QmpSchema {
    /// Parses the answer.
    ///
    /// # Panics
    /// When it is not a list of entities.
    pub fn new(answer: &Value) -> Self {
        let entities = answer.as_array().expect("a list").iter();
        Self(entities.map(|entity| (text(entity, "name").to_owned(), entity.clone())).collect())
    }

    /// The names of all commands.
    pub fn commands(&self) -> Vec<&str> {
        let entities = self.0.iter().filter(|(_, entity)| entity["meta-type"] == "command");
        entities.map(|(name, _)| name.as_str()).collect()
    }

    /// Random arguments of a command that fit the schema.
    ///
    /// # Panics
    /// When there is no such command.
    pub fn arguments(&self, command: &str, random: &mut Rng, make: MakeMember<'_>) -> Value {
        self.random(text(&self.0[command], "arg-type"), random, make, 0)
    }

    /// Why the result of a command does not fit the schema; `None` if it does.
    ///
    /// # Panics
    /// When there is no such command.
    pub fn misfit(&self, command: &str, result: &Value) -> Option<String> {
        self.misfit_of(text(&self.0[command], "ret-type"), result)
    }

    fn random(&self, kind: &str, random: &mut Rng, make: MakeMember<'_>, depth: usize) -> Value {
        let entity = &self.0[kind];
        if depth > MAX_DEPTH {
            return Value::Null;
        }
        match text(entity, "meta-type") {
            "builtin" => builtin(text(entity, "json-type"), random),
            "enum" => random.choice(words(entity)).map_or(Value::Null, Value::from),
            "array" => {
                let of = text(entity, "element-type");
                (0..random.usize(..3)).map(|_| self.random(of, random, make, depth + 1)).collect()
            }
            "alternate" => match random.choice(list(entity, "members")) {
                Some(one) => self.random(text(one, "type"), random, make, depth + 1),
                None => Value::Null,
            },
            _ => {
                let mut object = Map::new();
                self.add_members(entity, &mut object, random, make, depth);
                object.into()
            }
        }
    }

    /// Adds random members of a type to an object, and those of its variant.
    fn add_members(
        &self,
        entity: &Value,
        object: &mut Map<String, Value>,
        random: &mut Rng,
        make: MakeMember<'_>,
        depth: usize,
    ) {
        for member in list(entity, "members") {
            let name = text(member, "name");
            let is_optional = member.get("default").is_some();
            if is_optional && random.bool() {
                continue;
            }
            let made = make(name, random).filter(|made| self.fits(text(member, "type"), made));
            let value =
                made.unwrap_or_else(|| self.random(text(member, "type"), random, make, depth + 1));
            object.insert(name.to_owned(), value);
        }
        let case = object.get(text(entity, "tag")).cloned();
        let variant =
            list(entity, "variants").iter().find(|one| case.as_ref() == Some(&one["case"]));
        if let Some(variant) = variant {
            self.add_members(&self.0[text(variant, "type")], object, random, make, depth);
        }
    }

    fn fits(&self, kind: &str, value: &Value) -> bool {
        self.misfit_of(kind, value).is_none()
    }

    fn misfit_of(&self, kind: &str, value: &Value) -> Option<String> {
        let entity = &self.0[kind];
        let fits = match text(entity, "meta-type") {
            "builtin" => match text(entity, "json-type") {
                "string" => value.is_string(),
                "int" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                "null" => value.is_null(),
                _ => true,
            },
            "enum" => value.as_str().is_some_and(|word| words(entity).contains(&word)),
            "array" => {
                let Some(elements) = value.as_array() else { return Some(wrong(kind, value)) };
                let of = text(entity, "element-type");
                return elements.iter().find_map(|element| self.misfit_of(of, element));
            }
            "alternate" => {
                list(entity, "members").iter().any(|one| self.fits(text(one, "type"), value))
            }
            _ => {
                let Some(object) = value.as_object() else { return Some(wrong(kind, value)) };
                let mut rest = object.clone();
                let misfit = self.misfit_of_members(entity, object, &mut rest);
                return misfit.or(rest.keys().next().map(|name| format!("{kind} has no {name}")));
            }
        };
        (!fits).then(|| wrong(kind, value))
    }

    /// Why members of an object, or those of its variant, do not fit. Removes the checked members
    /// from `rest`.
    fn misfit_of_members(
        &self,
        entity: &Value,
        object: &Map<String, Value>,
        rest: &mut Map<String, Value>,
    ) -> Option<String> {
        for member in list(entity, "members") {
            let name = text(member, "name");
            rest.remove(name);
            let misfit = match object.get(name) {
                Some(value) => self.misfit_of(text(member, "type"), value),
                None if member.get("default").is_some() => None,
                None => Some(format!("{} lacks {name}", text(entity, "name"))),
            };
            if misfit.is_some() {
                return misfit;
            }
        }
        let case = object.get(text(entity, "tag"));
        let variant = list(entity, "variants").iter().find(|one| case == Some(&one["case"]))?;
        self.misfit_of_members(&self.0[text(variant, "type")], object, rest)
    }
}

fn wrong(kind: &str, value: &Value) -> String {
    format!("{value}: no {kind}")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn words(entity: &Value) -> Vec<&str> {
    list(entity, "values").iter().filter_map(Value::as_str).collect()
}

fn builtin(kind: &str, random: &mut Rng) -> Value {
    match kind {
        "string" => {
            (0..random.usize(..12)).map(|_| random.alphanumeric()).collect::<String>().into()
        }
        "int" if random.bool() => json!(random.u64(..) >> random.u32(..64)),
        "int" => json!(random.i64(-3..3)),
        "number" => json!(random.f64()),
        "boolean" => json!(random.bool()),
        _ => Value::Null,
    }
}
