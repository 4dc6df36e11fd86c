//! The policy file: TOML, checked key by key so that one reading reports everything.
//!
//! An unknown key names the nearest known one and its table. A key that asks for a
//! network is answered with the reason why there is none. Values of the wrong type
//! or out of range say what is allowed. Only then does serde build the draft, and
//! sealing checks it once more; this module adds messages, not authority.

use crate::draft::{PolicyDraft, check_fraction, check_int};
use crate::limits::{
    COPY_FILES, COPY_MIB, DENIAL_BURST, DENIAL_EWMA, DENIAL_WINDOW_S, DISK_MIB, FractionRange, IntRange,
    MEMORY_MIB, MUTATION_BURST, MUTATION_EWMA, MUTATION_WINDOW_S, OUTPUT_MIB, PIDS, TIMEOUT_S, TMP_MIB,
    VCPUS,
};
use crate::violation::{Code, Findings, Violations};
use toml::{Table, Value};

/// Why a policy file was refused: the operator asked wrongly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// It is not TOML.
    #[error("the policy file is not TOML: {0}")]
    Syntax(String),
    /// It says what no policy may say.
    #[error("the policy file is refused:\n{0}")]
    Refused(#[from] Violations),
}

enum Kind {
    Int(IntRange),
    Fraction(FractionRange),
    Flag,
    Text,
    Texts,
    OneOf(&'static [&'static str]),
}

/// Every table and key. `every_default_key_is_in_the_schema` holds it to the draft.
const SCHEMA: &[(&str, &[(&str, Kind)])] = &[
    (
        "limits",
        &[
            ("vcpus", Kind::Int(VCPUS)),
            ("memory_mib", Kind::Int(MEMORY_MIB)),
            ("disk_mib", Kind::Int(DISK_MIB)),
            ("tmp_mib", Kind::Int(TMP_MIB)),
            ("pids", Kind::Int(PIDS)),
            ("output_mib", Kind::Int(OUTPUT_MIB)),
            ("copy_mib", Kind::Int(COPY_MIB)),
            ("copy_files", Kind::Int(COPY_FILES)),
            ("timeout_s", Kind::Int(TIMEOUT_S)),
        ],
    ),
    (
        "capabilities",
        &[
            ("write", Kind::Texts),
            ("write_trees", Kind::Texts),
            ("spawn", Kind::Flag),
            ("packages", Kind::Texts),
        ],
    ),
    ("exec", &[("workspace", Kind::OneOf(&["deny", "allow"]))]),
    (
        "thresholds",
        &[
            ("denial_burst", Kind::Int(DENIAL_BURST)),
            ("denial_window_s", Kind::Int(DENIAL_WINDOW_S)),
            ("denial_ewma", Kind::Fraction(DENIAL_EWMA)),
            ("mutation_burst", Kind::Int(MUTATION_BURST)),
            ("mutation_window_s", Kind::Int(MUTATION_WINDOW_S)),
            ("mutation_ewma", Kind::Fraction(MUTATION_EWMA)),
        ],
    ),
    ("profile", &[("fingerprint", Kind::Text)]),
    ("backend.kata", &[("docker_host", Kind::Text), ("runtime_name", Kind::Text)]),
];

impl PolicyDraft {
    /// Reads a policy file. Everything that is wrong with it is reported at once.
    pub fn from_toml(text: &str) -> Result<PolicyDraft, PolicyError> {
        let table: Table = toml::from_str(text).map_err(|error| PolicyError::Syntax(error.to_string()))?;
        let mut findings = Findings::default();
        walk("", &table, &mut findings);
        findings.finish()?;
        let draft: PolicyDraft =
            table.try_into().map_err(|error: toml::de::Error| PolicyError::Syntax(error.to_string()))?;
        draft.clone().seal()?;
        Ok(draft)
    }
}

fn walk(table_name: &str, table: &Table, findings: &mut Findings) {
    let keys = SCHEMA.iter().find(|(name, _)| *name == table_name).map_or([].as_slice(), |(_, keys)| keys);
    for (key, value) in table {
        let full = if table_name.is_empty() { key.clone() } else { format!("{table_name}.{key}") };
        let is_table = SCHEMA.iter().any(|(name, _)| *name == full || name.starts_with(&format!("{full}.")));
        if let Some((_, kind)) = keys.iter().find(|(name, _)| name == key) {
            check(table_name, key, kind, value, findings);
        } else if is_table {
            match value {
                Value::Table(inner) => walk(&full, inner, findings),
                other => findings.add(
                    Code::WrongType,
                    format!("{full} is a table, not {}: write `[{full}]`", describe(other)),
                ),
            }
        } else if asks_for_network(key) {
            let what = if value.is_table() { format!("[{full}]") } else { format!("`{full}`") };
            findings.add(
                Code::NetworkKey,
                format!(
                    "{what}: there is no network setting. The machine has no network device, and no policy can grant \
                     one: put what the task needs into its image, or copy it in with --put"
                ),
            );
        } else {
            unknown(table_name, key, value, findings);
            // A table that is itself unknown may still hide the one key that deserves its own answer.
            if let Value::Table(inner) = value {
                inner.iter().filter(|(key, _)| asks_for_network(key)).for_each(|(key, value)| {
                    let alone = Table::from_iter([(key.clone(), value.clone())]);
                    walk(&full, &alone, findings);
                });
            }
        }
    }
}

fn asks_for_network(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.contains("network") || ["net", "net_egress", "egress", "internet"].contains(&key.as_str())
}

fn unknown(table_name: &str, key: &str, value: &Value, findings: &mut Findings) {
    let place =
        |table: &str| if table.is_empty() { "the top level".to_owned() } else { format!("[{table}]") };
    let hint = if value.is_table() {
        let full = if table_name.is_empty() { key.to_owned() } else { format!("{table_name}.{key}") };
        let known = SCHEMA.iter().map(|(name, _)| *name);
        nearest(&full, known).map(|name| format!("the nearest table is [{name}]"))
    } else {
        let elsewhere = SCHEMA.iter().find(|(_, keys)| keys.iter().any(|(name, _)| *name == key));
        match elsewhere {
            Some((table, _)) => Some(format!("`{key}` belongs into [{table}]")),
            None => {
                let here = SCHEMA.iter().find(|(name, _)| *name == table_name);
                let keys: Vec<(&str, &str)> = match here {
                    Some((table, keys)) => keys.iter().map(|(key, _)| (*key, *table)).collect(),
                    None => SCHEMA
                        .iter()
                        .flat_map(|(t, keys)| keys.iter().map(move |(key, _)| (*key, *t)))
                        .collect(),
                };
                nearest(key, keys.iter().map(|(key, _)| *key)).map(|name| {
                    let table =
                        keys.iter().find(|(key, _)| *key == name).map_or(table_name, |(_, table)| table);
                    format!("the nearest key is `{name}` in {}", place(table))
                })
            }
        }
    };
    let kind = if value.is_table() { "table" } else { "key" };
    let hint = hint.map(|hint| format!(": {hint}")).unwrap_or_default();
    findings.add(Code::UnknownKey, format!("unknown {kind} `{key}` in {}{hint}", place(table_name)));
}

fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known.min_by_key(|name| strsim::damerau_levenshtein(&word.to_ascii_lowercase(), name))
}

fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the text {text:?}"),
        Value::Integer(number) => format!("the number {number}"),
        Value::Float(number) => format!("the number {number}"),
        Value::Boolean(flag) => format!("{flag}"),
        Value::Datetime(when) => format!("the date {when}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
    }
}

fn check(table: &str, key: &str, kind: &Kind, value: &Value, findings: &mut Findings) {
    let wanted = match (kind, value) {
        (Kind::Int(range), Value::Integer(number)) => {
            if !range.contains(*number) {
                check_int(table, key, *number, *range, findings);
            }
            return;
        }
        (Kind::Fraction(range), Value::Float(number)) => {
            return check_fraction(table, key, *number, *range, findings);
        }
        (Kind::Flag, Value::Boolean(_)) | (Kind::Text, Value::String(_)) => return,
        (Kind::Texts, Value::Array(entries)) if entries.iter().all(Value::is_str) => return,
        (Kind::OneOf(choices), Value::String(text)) if choices.contains(&text.as_str()) => return,
        (Kind::Int(range), _) => format!("a whole number in {}..={}", range.min, range.max),
        (Kind::Fraction(range), _) => {
            format!("a fraction in {}..={}, such as {}", range.min, range.max, range.default)
        }
        (Kind::Flag, _) => "true or false".to_owned(),
        (Kind::Text, _) => "a text in quotes".to_owned(),
        (Kind::Texts, _) => "a list of texts in quotes".to_owned(),
        (Kind::OneOf(choices), _) => {
            choices.iter().map(|choice| format!("{choice:?}")).collect::<Vec<_>>().join(" or ")
        }
    };
    findings.add(Code::WrongType, format!("[{table}] {key}: {} where {wanted} is needed", describe(value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> Violations {
        match PolicyDraft::from_toml(text) {
            Err(PolicyError::Refused(violations)) => violations,
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(PolicyDraft::from_toml("").unwrap(), PolicyDraft::default());
    }

    #[test]
    fn a_full_file_is_read() {
        let hash = "ab".repeat(32);
        let draft = PolicyDraft::from_toml(&format!(
            r#"
            [limits]
            vcpus = 2
            memory_mib = 1024
            disk_mib = 2048
            tmp_mib = 128
            pids = 512
            output_mib = 32
            timeout_s = 60
            [capabilities]
            write = ["/workspace/out.txt"]
            write_trees = ["/workspace"]
            spawn = true
            packages = ["numpy==2.3.1 sha256:{hash}"]
            [exec]
            workspace = "allow"
            [thresholds]
            denial_burst = 6
            denial_window_s = 30
            denial_ewma = 0.5
            mutation_burst = 4
            mutation_window_s = 20
            mutation_ewma = 0.4
            [profile]
            fingerprint = "file"
            [backend.kata]
            docker_host = "unix:///run/docker.sock"
            runtime_name = "kata-qemu"
            "#
        ))
        .unwrap();
        assert_eq!(draft.limits.pids, 512);
        assert_eq!(draft.thresholds.denial_ewma, 0.5);
        assert_eq!(draft.backend.kata.runtime_name, "kata-qemu");
        assert!(draft.seal().unwrap().capabilities().may_spawn());
    }

    #[test]
    fn unknown_keys_name_the_nearest_and_its_table() {
        let text = refusal("[limits]\nvcpu = 1\nmemry_mib = 512\n[capabilites]\nspawn = true\n").to_string();
        for part in [
            "`vcpu` in [limits]",
            "`vcpus` in [limits]",
            "`memory_mib`",
            "table `capabilites`",
            "[capabilities]",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let text = refusal("vcpus = 1\n").to_string();
        assert!(text.contains("belongs into [limits]"), "{text}");
        let text = refusal("vpcus = 1\n").to_string();
        assert!(text.contains("`vcpus` in [limits]"), "{text}");
        let text = refusal("[backend.kta]\nx = 1\n").to_string();
        assert!(text.contains("[backend.kata]"), "{text}");
    }

    #[test]
    fn a_network_key_anywhere_gets_the_explanation() {
        for text in [
            "[network]\nallow=true\n",
            "network = true\n",
            "[limits]\nnetwork = \"none\"\n",
            "[backend.kata]\nnetwork_mode = \"bridge\"\n",
            "[capabilities.network]\nhosts = []\n",
            "[vm.network]\nx = 1\n",
            "[Network]\n",
            "[capabilities]\nnet_egress = true\n",
        ] {
            let violations = refusal(text);
            assert!(violations.has(Code::NetworkKey), "{text}: {violations}");
            let message = violations.to_string();
            assert!(
                message.contains("no network setting") && message.contains("no policy can grant"),
                "{message}"
            );
        }
    }

    #[test]
    fn wrong_types_and_ranges_say_what_is_allowed_all_at_once() {
        let violations = refusal(
            "[limits]\nvcpus = 9\nmemory_mib = \"big\"\npids = -1\ntimeout_s = 9223372036854775807\n\
             [capabilities]\nspawn = 1\nwrite = [1]\npackages = \"numpy\"\n\
             [exec]\nworkspace = \"maybe\"\n[thresholds]\ndenial_ewma = 1.5\nmutation_ewma = nan\nmutation_burst = 0.5\n\
             [profile]\nfingerprint = 3\n[backend]\nkata = 1\n",
        );
        let text = violations.to_string();
        assert_eq!(violations.iter().count(), 13, "{text}");
        for part in [
            "[limits] vcpus: 9 is outside 1..=8",
            "the text \"big\" where a whole number in 128..=16384",
            "-1 is outside",
            "true or false",
            "a list of texts",
            "\"deny\" or \"allow\"",
            "1.5 is outside 0.05..=0.95",
            "NaN is outside",
            "backend.kata is a table",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn what_only_sealing_sees_is_refused_by_the_reading_too() {
        assert!(refusal("[capabilities]\nwrite_trees = [\"/etc\"]\n").has(Code::WriteImmutable));
        assert!(refusal("[limits]\nmemory_mib = 128\ntmp_mib = 129\n").has(Code::TmpOverMemory));
    }

    #[test]
    fn bad_toml_says_where() {
        let Err(PolicyError::Syntax(text)) = PolicyDraft::from_toml("[limits\n") else { panic!("read") };
        assert!(text.contains("line 1"), "{text}");
        assert!(matches!(
            PolicyDraft::from_toml("[limits]\nvcpus=1\nvcpus=2\n"),
            Err(PolicyError::Syntax(_))
        ));
    }

    #[test]
    fn every_default_key_is_in_the_schema() {
        let draft = serde_json::to_value(PolicyDraft::default()).unwrap();
        let mut count = 0;
        for (table, keys) in SCHEMA {
            let node = draft.pointer(&format!("/{}", table.replace('.', "/"))).unwrap().as_object().unwrap();
            let mut names: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
            names.sort_unstable();
            let mut have: Vec<&str> = node.keys().map(String::as_str).collect();
            have.sort_unstable();
            assert_eq!(names, have, "{table}");
            count += names.len();
        }
        assert_eq!(count, 23);
    }
}
