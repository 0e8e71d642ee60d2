//! Our entry in the node's network configuration: where it goes, and how it goes again. Text in, text out.

use super::ordered::Json;

/// Type of our entry.
pub const TYPE: &str = "weir-cni";
/// What a configuration without a name is called in a list.
const UNNAMED: &str = "k8s-pod-network";
/// What one without a version has.
const UNVERSIONED: &str = "0.3.1";

/// Why a file is no network configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Nothing is in it.
    #[error("it is empty")]
    Empty,
    /// It is no JSON.
    #[error("it is no JSON: {0}")]
    NotJson(String),
    /// It is, but no configuration.
    #[error("{0}")]
    Shape(&'static str),
}

/// What has to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    /// It is as it shall be.
    Nothing,
    /// The file gets this text.
    Write(String),
    /// A file of this name gets this text, in the place of the one looked at.
    Replace(String, String),
}

/// Puts our entry last into the configuration of a file, and takes it from everywhere else in it.
///
/// # Errors
/// When a runtime would not take the file either.
pub fn insert(name: &str, text: &str, entry: &Json) -> Result<Edit, Invalid> {
    let before = read(name, text)?;
    let Some(stem) = name.strip_suffix(".conf") else {
        let mut list = before.clone();
        let Some(Json::List(plugins)) = list.get_mut("plugins") else { return Err(NO_PLUGINS) };
        plugins.retain(|plugin| !is_ours(plugin));
        if plugins.is_empty() {
            return Err(Invalid::Shape("there is no other plugin in it"));
        }
        plugins.push(entry.clone());
        return Ok(if same(&list, &before) { Edit::Nothing } else { Edit::Write(print(&list)) });
    };
    let of = |key: &str, default: &str| before.get(key).cloned().unwrap_or_else(|| Json::text(default));
    if is_ours(&before) {
        return Err(Invalid::Shape("there is no other plugin in it"));
    }
    let list = Json::Object(vec![
        ("name".into(), of("name", UNNAMED)),
        ("cniVersion".into(), of("cniVersion", UNVERSIONED)),
        ("plugins".into(), Json::List(vec![before, entry.clone()])),
    ]);
    Ok(Edit::Replace(format!("{stem}.conflist"), print(&list)))
}

/// Takes our entry out; everything else stays.
///
/// # Errors
/// As [`insert`].
pub fn remove(name: &str, text: &str) -> Result<Edit, Invalid> {
    let before = read(name, text)?;
    let mut list = before.clone();
    if let Some(Json::List(plugins)) = list.get_mut("plugins") {
        plugins.retain(|plugin| !is_ours(plugin));
    }
    Ok(if list == before { Edit::Nothing } else { Edit::Write(print(&list)) })
}

/// Whether a runtime takes this for a configuration's file.
pub fn is_config(name: &str) -> bool {
    [".conf", ".conflist"].iter().any(|end| name.len() > end.len() && name.ends_with(end))
}

const NO_PLUGINS: Invalid = Invalid::Shape("it has no list of plugins");

fn read(name: &str, text: &str) -> Result<Json, Invalid> {
    if text.trim().is_empty() {
        return Err(Invalid::Empty);
    }
    let json: Json = serde_json::from_str(text).map_err(|error| Invalid::NotJson(error.to_string()))?;
    let typed = |plugin: &Json| plugin.get("type").and_then(Json::as_str).is_some_and(|it| !it.is_empty());
    if name.ends_with(".conf") {
        return if typed(&json) { Ok(json) } else { Err(Invalid::Shape("it has no type")) };
    }
    match json.get("plugins") {
        Some(Json::List(plugins)) if plugins.is_empty() => {
            Err(Invalid::Shape("its list of plugins is empty"))
        }
        Some(Json::List(plugins)) if plugins.iter().all(typed) => Ok(json),
        Some(Json::List(_)) => Err(Invalid::Shape("a plugin of it has no type")),
        _ => Err(NO_PLUGINS),
    }
}

fn is_ours(plugin: &Json) -> bool {
    plugin.get("type").and_then(Json::as_str) == Some(TYPE)
}

/// Equal in meaning: somebody else may have written the keys in another order, and is not to be fought over that.
fn same(a: &Json, b: &Json) -> bool {
    serde_json::to_value(a).ok() == serde_json::to_value(b).ok()
}

fn print(json: &Json) -> String {
    let mut text = serde_json::to_string_pretty(json).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry() -> Json {
        json!({ "type": TYPE, "socket": "/s" }).into()
    }

    fn flat(text: &str) -> String {
        serde_json::to_string(&serde_json::from_str::<Json>(text).unwrap()).unwrap()
    }

    const OURS: &str = r#"{"socket":"/s","type":"weir-cni"}"#;

    #[test]
    fn ours_is_last_and_all_else_stays_in_its_order() {
        for (before, after) in [
            (
                r#"{"name":"n","cniVersion":"1.0.0","plugins":[{"type":"ptp","b":1,"a":2}]}"#,
                Some(format!(
                    r#"{{"name":"n","cniVersion":"1.0.0","plugins":[{{"type":"ptp","b":1,"a":2}},{OURS}]}}"#
                )),
            ),
            // There, and last.
            (r#"{"plugins":[{"type":"x"},{"socket":"/s","type":"weir-cni"}],"name":"n"}"#, None),
            // The same in another order of keys.
            (r#"{"plugins":[{"type":"x"},{"type":"weir-cni","socket":"/s"}]}"#, None),
            // There, but not last.
            (
                r#"{"plugins":[{"type":"weir-cni","socket":"/s"},{"type":"x"}],"name":"n"}"#,
                Some(format!(r#"{{"plugins":[{{"type":"x"}},{OURS}],"name":"n"}}"#)),
            ),
            // There, but otherwise; and twice.
            (
                r#"{"plugins":[{"type":"weir-cni"},{"type":"x"},{"type":"weir-cni","socket":"/old"}]}"#,
                Some(format!(r#"{{"plugins":[{{"type":"x"}},{OURS}]}}"#)),
            ),
            // Beside Istio's own.
            (
                r#"{"plugins":[{"type":"x"},{"type":"istio-cni"}]}"#,
                Some(format!(r#"{{"plugins":[{{"type":"x"}},{{"type":"istio-cni"}},{OURS}]}}"#)),
            ),
        ] {
            match (insert("10-x.conflist", before, &entry()).unwrap(), after) {
                (Edit::Nothing, None) => {}
                (Edit::Write(text), Some(after)) => {
                    assert_eq!(flat(&text), after);
                    // Done once is done.
                    assert_eq!(insert("10-x.conflist", &text, &entry()), Ok(Edit::Nothing));
                    let Edit::Write(without) = remove("10-x.conflist", &text).unwrap() else { panic!() };
                    assert!(!without.contains(TYPE) && remove("x.conflist", &without) == Ok(Edit::Nothing));
                }
                (edit, after) => panic!("{before}: {edit:?}, wanted {after:?}"),
            }
        }
    }

    #[test]
    fn a_single_plugin_becomes_a_list() {
        for (before, name, version) in [
            (r#"{"cniVersion":"0.4.0","name":"n","type":"ptp","z":1}"#, "n", "0.4.0"),
            (r#"{"type":"ptp"}"#, UNNAMED, UNVERSIONED),
        ] {
            let Edit::Replace(file, text) = insert("10-x.conf", before, &entry()).unwrap() else { panic!() };
            assert_eq!(file, "10-x.conflist");
            let plugins = format!("[{before},{OURS}]");
            assert_eq!(
                flat(&text),
                format!(r#"{{"name":"{name}","cniVersion":"{version}","plugins":{plugins}}}"#)
            );
        }
    }

    #[test]
    fn what_a_runtime_would_not_take_is_left_alone() {
        for (name, text) in [
            ("a.conflist", ""),
            ("a.conflist", " \n"),
            ("a.conflist", "{"),
            ("a.conflist", "[]"),
            ("a.conflist", "7"),
            ("a.conflist", "{}"),
            ("a.conflist", r#"{"plugins":{}}"#),
            ("a.conflist", r#"{"plugins":[]}"#),
            ("a.conflist", r#"{"plugins":[{}]}"#),
            ("a.conflist", r#"{"plugins":[{"type":""}]}"#),
            ("a.conflist", r#"{"plugins":[{"type":"weir-cni"}]}"#),
            ("a.conf", r#"{"plugins":[{"type":"x"}]}"#),
            ("a.conf", r#"{"type":7}"#),
            ("a.conf", r#"{"type":"weir-cni"}"#),
        ] {
            assert!(insert(name, text, &entry()).is_err(), "{name} {text}");
        }
        for (name, is) in [
            ("a.conf", true),
            ("a.conflist", true),
            (".conf", false),
            ("a.json", false),
            ("a.conflist.new", false),
        ] {
            assert_eq!(is_config(name), is, "{name}");
        }
    }
}
