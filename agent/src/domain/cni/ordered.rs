//! JSON whose keys stay in the order they came in: a file that belongs to others is given back as it was, but for what
//! is ours.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, SeqAccess, Visitor},
    ser::SerializeMap,
};
use serde_json::{Number, Value};

/// A JSON value. Keys that come twice are kept twice.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// Null, a boolean, a number or a string.
    Scalar(Value),
    /// A list.
    List(Vec<Json>),
    /// An object.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// A string.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Scalar(Value::String(text.into()))
    }

    /// The value of a key, of an object.
    pub fn get(&self, key: &str) -> Option<&Self> {
        let Self::Object(pairs) = self else { return None };
        pairs.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        let Self::Object(pairs) = self else { return None };
        pairs.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// A string's text.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Scalar(Value::String(text)) = self { Some(text) } else { None }
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        match value {
            Value::Array(items) => Self::List(items.into_iter().map(Self::from).collect()),
            Value::Object(pairs) => {
                Self::Object(pairs.into_iter().map(|(key, value)| (key, Self::from(value))).collect())
            }
            scalar => Self::Scalar(scalar),
        }
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Scalar(value) => value.serialize(serializer),
            Self::List(items) => items.serialize(serializer),
            Self::Object(pairs) => {
                let mut map = serializer.serialize_map(Some(pairs.len()))?;
                for (key, value) in pairs {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyJson)
    }
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Scalar(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Scalar(Number::from_f64(value).map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Json::Object(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_in_its_order() {
        for text in [
            r#"{"z":1,"a":[true,null,-2,3.5,"x"],"m":{"b":{},"a":[]},"z":18446744073709551615}"#,
            "[]",
            "\"text\"",
            "null",
        ] {
            let json: Json = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&json).unwrap(), text);
        }
    }
}
