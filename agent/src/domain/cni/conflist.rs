//! Our entry in the node's network configuration: where it goes, and how it goes again. Text in, text out.

use super::{LATEST, ordered::Json};

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
    let (before, list) = with_ours(name, text, entry)?;
    Ok(match single(name) {
        Some(stem) => Edit::Replace(format!("{stem}.conflist"), print(&list)),
        None if same(&list, &before) => Edit::Nothing,
        None => Edit::Write(print(&list)),
    })
}

/// A list of our own with what a file configures, and our entry last. `now` is what it has so far.
///
/// # Errors
/// As [`insert`].
pub fn beside(name: &str, text: &str, entry: &Json, now: Option<&str>) -> Result<Edit, Invalid> {
    let (_, list) = with_ours(name, text, entry)?;
    Ok(unless_there(&list, now))
}

/// A configuration of nothing but our entry, for platforms whose runtime calls each one by its name.
pub fn alone(entry: &Json, now: Option<&str>) -> Edit {
    let mut keys = vec![("cniVersion".into(), Json::text(LATEST)), ("name".into(), Json::text(TYPE))];
    if let Json::Object(pairs) = entry {
        keys.extend(pairs.iter().cloned());
    }
    unless_there(&Json::Object(keys), now)
}

/// Whether a file is nothing but our entry.
pub fn is_alone(name: &str, text: &str) -> bool {
    single(name).is_some() && read(name, text).is_ok_and(|json| is_ours(&json))
}

fn unless_there(wanted: &Json, now: Option<&str>) -> Edit {
    let now = now.and_then(|text| serde_json::from_str::<Json>(text).ok());
    if now.is_some_and(|now| same(wanted, &now)) { Edit::Nothing } else { Edit::Write(print(wanted)) }
}

/// What the file has, and the list with our entry that it becomes.
fn with_ours(name: &str, text: &str, entry: &Json) -> Result<(Json, Json), Invalid> {
    let before = read(name, text)?;
    if single(name).is_some() {
        if is_ours(&before) {
            return Err(ONLY_OURS);
        }
        let of = |key: &str, default: &str| before.get(key).cloned().unwrap_or_else(|| Json::text(default));
        let list = Json::Object(vec![
            ("name".into(), of("name", UNNAMED)),
            ("cniVersion".into(), of("cniVersion", UNVERSIONED)),
            ("plugins".into(), Json::List(vec![before.clone(), entry.clone()])),
        ]);
        return Ok((before, list));
    }
    let mut list = before.clone();
    let Some(Json::List(plugins)) = list.get_mut("plugins") else { return Err(NO_PLUGINS) };
    plugins.retain(|plugin| !is_ours(plugin));
    if plugins.is_empty() {
        return Err(ONLY_OURS);
    }
    plugins.push(entry.clone());
    Ok((before, list))
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
    [".conf", ".json", ".conflist"].iter().any(|end| name.len() > end.len() && name.ends_with(end))
}

/// The stem of a name that says there is one plugin and not a list.
fn single(name: &str) -> Option<&str> {
    name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"))
}

const NO_PLUGINS: Invalid = Invalid::Shape("it has no list of plugins");
const ONLY_OURS: Invalid = Invalid::Shape("there is no other plugin in it");

fn read(name: &str, text: &str) -> Result<Json, Invalid> {
    if text.trim().is_empty() {
        return Err(Invalid::Empty);
    }
    let json: Json = serde_json::from_str(text).map_err(|error| Invalid::NotJson(error.to_string()))?;
    let typed = |plugin: &Json| plugin.get("type").and_then(Json::as_str).is_some_and(|it| !it.is_empty());
    if single(name).is_some() {
        return if typed(&json) { Ok(json) } else { Err(Invalid::Shape("it has no type")) };
    }
    if json.get("plugins").is_some() && json.get("name").and_then(Json::as_str).is_none_or(str::is_empty) {
        return Err(Invalid::Shape("it has no name"));
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
            (r#"{"name":"n","plugins":[{"type":"x"},{"type":"weir-cni","socket":"/s"}]}"#, None),
            // There, but not last.
            (
                r#"{"plugins":[{"type":"weir-cni","socket":"/s"},{"type":"x"}],"name":"n"}"#,
                Some(format!(r#"{{"plugins":[{{"type":"x"}},{OURS}],"name":"n"}}"#)),
            ),
            // There, but otherwise; and twice.
            (
                r#"{"name":"n","plugins":[{"type":"weir-cni"},{"type":"x"},{"type":"weir-cni","socket":"/old"}]}"#,
                Some(format!(r#"{{"name":"n","plugins":[{{"type":"x"}},{OURS}]}}"#)),
            ),
            // Beside Istio's own.
            (
                r#"{"name":"n","plugins":[{"type":"x"},{"type":"istio-cni"}]}"#,
                Some(format!(r#"{{"name":"n","plugins":[{{"type":"x"}},{{"type":"istio-cni"}},{OURS}]}}"#)),
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
            ("a.conflist", r#"{"name":"n","plugins":{}}"#),
            ("a.conflist", r#"{"name":"n","plugins":[]}"#),
            ("a.conflist", r#"{"name":"n","plugins":[{}]}"#),
            ("a.conflist", r#"{"name":"n","plugins":[{"type":""}]}"#),
            ("a.conflist", r#"{"name":"n","plugins":[{"type":"weir-cni"}]}"#),
            ("a.conflist", r#"{"plugins":[{"type":"x"}]}"#),
            ("a.conflist", r#"{"name":"","plugins":[{"type":"x"}]}"#),
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
            ("a.json", true),
            ("a.yaml", false),
            ("a.conflist.new", false),
        ] {
            assert_eq!(is_config(name), is, "{name}");
        }
    }

    #[test]
    fn a_list_of_our_own_follows_the_one_that_is_used() {
        let primary = r#"{"name":"n","plugins":[{"type":"ptp"},{"type":"istio-cni"}]}"#;
        let own = format!(r#"{{"name":"n","plugins":[{{"type":"ptp"}},{{"type":"istio-cni"}},{OURS}]}}"#);
        for (now, writes) in [(None, true), (Some("{"), true), (Some(primary), true), (Some(&*own), false)] {
            match beside("10-x.conflist", primary, &entry(), now).unwrap() {
                Edit::Write(text) if writes => assert_eq!(flat(&text), own),
                Edit::Nothing if !writes => {}
                other => panic!("{now:?}: {other:?}"),
            }
        }
        // A single plugin's, too; and entries of ours that are left in it do not come twice.
        let Edit::Write(text) = beside("x.conf", r#"{"type":"ptp"}"#, &entry(), None).unwrap() else {
            panic!()
        };
        assert_eq!(text.matches(TYPE).count(), 1);
        assert_eq!(beside("y.conflist", &own, &entry(), Some(&own)), Ok(Edit::Nothing));
        assert!(beside("x.conflist", "", &entry(), None).is_err());
    }

    #[test]
    fn alone_it_is_a_configuration_by_itself() {
        let Edit::Write(text) = alone(&entry(), None) else { panic!() };
        assert!(is_alone("weir-cni.conf", &text) && !is_alone("weir-cni.conflist", &text));
        assert_eq!(alone(&entry(), Some(&text)), Edit::Nothing);
        assert!(!is_alone("x.conf", r#"{"type":"ptp"}"#));
    }
}
