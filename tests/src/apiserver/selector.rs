//! Label and field selectors.

use super::{object::Object, resource::Resource};

/// One requirement on a label's or a field's value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Exists,
    Absent,
    In(Vec<Box<str>>),
    NotIn(Vec<Box<str>>),
}

impl Test {
    fn holds(&self, value: Option<&str>) -> bool {
        let among = |values: &[Box<str>]| value.is_some_and(|value| values.iter().any(|one| **one == *value));
        match self {
            Self::Exists => value.is_some(),
            Self::Absent => value.is_none(),
            Self::In(values) => among(values),
            // An object without the label is not in the set.
            Self::NotIn(values) => !among(values),
        }
    }
}

/// Which objects a list or a watch wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Filter {
    /// From the path; all namespaces if absent.
    pub namespace: Option<Box<str>>,
    labels: Vec<(Box<str>, Test)>,
    fields: Vec<(Box<str>, Test)>,
}

impl Filter {
    pub(super) fn new(
        resource: Resource,
        namespace: Option<&str>,
        labels: &str,
        fields: &str,
    ) -> Result<Self, String> {
        Ok(Self {
            namespace: namespace.map(Into::into),
            labels: parse_labels(labels)?,
            fields: parse_fields(resource, fields)?,
        })
    }

    pub(super) fn matches(&self, object: &Object) -> bool {
        self.namespace.as_deref().is_none_or(|namespace| namespace == &*object.key.namespace)
            && self.fields.iter().all(|(field, test)| test.holds(Some(field_of(object, field))))
            && self.labels.iter().all(|(label, test)| test.holds(object.label(label)))
    }

    /// The only node whose pods can match, if there is one: an index has those.
    pub(super) fn node(&self) -> Option<&str> {
        self.fields.iter().find_map(|(field, test)| match test {
            Test::In(values) if &**field == "spec.nodeName" => Some(&*values[0]),
            _ => None,
        })
    }

    /// Does the path alone choose?
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }
}

fn field_of<'a>(object: &'a Object, field: &str) -> &'a str {
    match field {
        "metadata.name" => &object.key.name,
        "metadata.namespace" => &object.key.namespace,
        "spec.nodeName" => &object.node,
        "status.phase" => &object.phase,
        _ => unreachable!("refused by parse_fields"),
    }
}

/// `term` as key, operator, value.
fn equality(term: &str) -> Option<(&str, bool, &str)> {
    let at = term.find(['=', '!'])?;
    let (key, rest) = term.split_at(at);
    let (equal, value) = if let Some(value) = rest.strip_prefix("!=") {
        (false, value)
    } else {
        (true, rest.strip_prefix("==").or_else(|| rest.strip_prefix('='))?)
    };
    Some((key.trim(), equal, value.trim()))
}

fn one_of(equal: bool, value: &str) -> Test {
    let values = vec![value.into()];
    if equal { Test::In(values) } else { Test::NotIn(values) }
}

fn parse_fields(resource: Resource, text: &str) -> Result<Vec<(Box<str>, Test)>, String> {
    let terms = text.split(',').map(str::trim).filter(|term| !term.is_empty());
    terms
        .map(|term| {
            let (field, equal, value) =
                equality(term).ok_or_else(|| format!("invalid field selector {term:?}"))?;
            if !resource.selectable(field) {
                return Err(format!("field label not supported: {field}"));
            }
            Ok((field.into(), one_of(equal, value)))
        })
        .collect()
}

fn parse_labels(text: &str) -> Result<Vec<(Box<str>, Test)>, String> {
    // Commas inside parentheses belong to a set.
    let mut depth = 0;
    let terms = text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    let terms = terms.map(str::trim).filter(|term| !term.is_empty());
    terms.map(|term| parse_label(term).ok_or_else(|| format!("invalid label selector {term:?}"))).collect()
}

fn parse_label(term: &str) -> Option<(Box<str>, Test)> {
    let (key, test) = if let Some((head, set)) = term.split_once('(') {
        let values = set.strip_suffix(')')?.split(',').map(|value| value.trim().into()).collect();
        let mut words = head.split_whitespace();
        let (key, operator) = (words.next()?, words.next()?);
        let test = match (operator, words.next()) {
            ("in", None) => Test::In(values),
            ("notin", None) => Test::NotIn(values),
            _ => return None,
        };
        (key, test)
    } else if let Some(key) = term.strip_prefix('!') {
        (key.trim(), Test::Absent)
    } else if let Some((key, equal, value)) = equality(term) {
        (key, one_of(equal, value))
    } else {
        (term, Test::Exists)
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    (!key.is_empty() && key.chars().all(plain)).then(|| (key.into(), test))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::object::Key, *};

    fn pod() -> Object {
        let value = json!({
            "metadata": { "name": "a", "namespace": "ns", "labels": { "app": "web", "x.io/t": "" } },
            "spec": { "nodeName": "n1" }, "status": { "phase": "Running" },
        });
        Object::new(Key::new("ns", "a"), 1, value)
    }

    #[test]
    fn labels() {
        let table = [
            ("", Ok(true)),
            ("app=web", Ok(true)),
            ("app==web", Ok(true)),
            ("app = web", Ok(true)),
            ("app=db", Ok(false)),
            ("app!=web", Ok(false)),
            ("app!=db", Ok(true)),
            ("none!=db", Ok(true)),
            ("none=", Ok(false)),
            ("x.io/t=", Ok(true)),
            ("app", Ok(true)),
            ("!app", Ok(false)),
            ("none", Ok(false)),
            ("!none", Ok(true)),
            ("app in (db,web)", Ok(true)),
            ("app in (db, cache)", Ok(false)),
            ("app notin (db,cache)", Ok(true)),
            ("none notin (db)", Ok(true)),
            ("none in (db)", Ok(false)),
            ("app in (db,web),!none", Ok(true)),
            ("app in (db,web),none", Ok(false)),
            ("x.io/t,app=web", Ok(true)),
            ("app within (web)", Err(())),
            ("app in (web", Err(())),
            ("a b", Err(())),
            ("=web", Err(())),
        ];
        for (selector, want) in table {
            let got = Filter::new(Resource::Pods, None, selector, "");
            assert_eq!(got.map(|filter| filter.matches(&pod())).map_err(drop), want, "{selector:?}");
        }
    }

    #[test]
    fn fields() {
        let table = [
            ("spec.nodeName=n1", Ok(true)),
            ("spec.nodeName==n1", Ok(true)),
            ("spec.nodeName!=n1", Ok(false)),
            ("spec.nodeName=", Ok(false)),
            ("spec.nodeName!=", Ok(true)),
            ("metadata.name=a,metadata.namespace=ns", Ok(true)),
            ("metadata.name=a,metadata.namespace!=ns", Ok(false)),
            ("status.phase!=Succeeded,status.phase!=Failed", Ok(true)),
            ("spec.hostname=a", Err(())),
            ("metadata.name", Err(())),
        ];
        for (selector, want) in table {
            let got = Filter::new(Resource::Pods, None, "", selector);
            assert_eq!(got.map(|filter| filter.matches(&pod())).map_err(drop), want, "{selector:?}");
        }
        assert!(Filter::new(Resource::Namespaces, None, "", "spec.nodeName=n1").is_err());
        assert!(Filter::new(Resource::Namespaces, None, "", "metadata.namespace=a").is_err());
    }

    #[test]
    fn namespace_and_index() {
        let of = |namespace, fields| Filter::new(Resource::Pods, namespace, "", fields).unwrap();
        assert!(of(Some("ns"), "").matches(&pod()));
        assert!(!of(Some("other"), "").matches(&pod()));
        assert_eq!(of(None, "metadata.name=a,spec.nodeName=n1").node(), Some("n1"));
        assert_eq!(of(None, "spec.nodeName!=n1").node(), None);
    }
}
