//! What an image says about how its programs are started: the `config` part of an
//! OCI image configuration. It is a wish of the image, checked when it is read;
//! what a run makes of it is decided by the command line.

use crate::error::ImageError;
use crate::stage::Stage;
use crate::tree::Node;
use hotcell_policy::CleanPath;
use serde::{Deserialize, Serialize};

/// Environment variables at most; honest images have a dozen.
const MAX_ENV: usize = 256;
/// Bytes of environment, entrypoint and command together.
const MAX_TEXT: usize = 64 << 10;
/// Largest /etc/passwd or /etc/group that is read.
const MAX_ACCOUNTS: u64 = 1 << 20;
/// The user that a root image's programs run as.
const AGENT: u32 = 1000;

/// How an image's programs are started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageConfig {
    /// Environment: name and value, in the image's order.
    pub env: Vec<(String, String)>,
    /// Working directory; none where the image says nothing or `/`.
    pub workdir: Option<String>,
    /// User as the image names it; none for root.
    pub user: Option<String>,
    /// What `user` is: the user id, never 0.
    pub uid: u32,
    /// The group id, never 0.
    pub gid: u32,
    /// Put before every command.
    pub entrypoint: Vec<String>,
    /// The command where none is given.
    pub cmd: Vec<String>,
}

/// The `config` object, as image tools write it. It has other keys as well.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RawConfig {
    #[serde(rename = "Env")]
    env: Option<Vec<String>>,
    #[serde(rename = "WorkingDir")]
    workdir: Option<String>,
    #[serde(rename = "User")]
    user: Option<String>,
    #[serde(rename = "Entrypoint")]
    entrypoint: Option<Vec<String>>,
    #[serde(rename = "Cmd")]
    cmd: Option<Vec<String>>,
}

impl ImageConfig {
    /// The configuration of an image that says nothing.
    pub(crate) fn none() -> ImageConfig {
        ImageConfig { uid: AGENT, gid: AGENT, ..ImageConfig::default() }
    }

    /// Checks what an image says, and looks its user up in its own accounts.
    pub(crate) fn resolve(raw: RawConfig, stage: &mut Stage) -> Result<ImageConfig, ImageError> {
        let fail = |why: String| ImageError::Source { what: "the image's configuration".into(), why };
        let texts = [&raw.env, &raw.entrypoint, &raw.cmd];
        let total: usize = texts.iter().flat_map(|list| list.iter().flatten()).map(String::len).sum();
        if total > MAX_TEXT || texts.iter().any(|list| list.as_ref().is_some_and(|l| l.len() > MAX_ENV)) {
            return Err(fail(format!("environment and command have {total} bytes, over {MAX_TEXT}")));
        }
        if texts.iter().flat_map(|list| list.iter().flatten()).any(|text| text.contains('\0')) {
            return Err(fail("a text in it has a NUL byte".into()));
        }
        let mut config = ImageConfig::none();
        for text in raw.env.into_iter().flatten() {
            let (name, value) = text.split_once('=').unwrap_or((&text, ""));
            if name.is_empty() {
                return Err(fail(format!("{:?} is no environment variable", text)));
            }
            config.env.push((name.to_owned(), value.to_owned()));
        }
        if let Some(workdir) = raw.workdir.filter(|dir| !dir.is_empty()) {
            let path = CleanPath::clean(&workdir)
                .map_err(|error| fail(format!("the working directory {workdir:?}: {error}")))?;
            config.workdir = Some(path.as_str().to_owned()).filter(|path| path != "/");
        }
        if let Some(user) = raw.user.filter(|user| !user.is_empty()) {
            let (uid, gid) = account(stage, &user).map_err(fail)?;
            if uid != 0 {
                // Group root is refused by the guest as well.
                (config.uid, config.gid) = (uid, if gid == 0 { uid } else { gid });
                config.user = Some(user);
            }
        }
        config.entrypoint = raw.entrypoint.unwrap_or_default();
        config.cmd = raw.cmd.unwrap_or_default();
        Ok(config)
    }
}

/// `user`, `uid`, `user:group`, `uid:gid`, as Docker reads it.
fn account(stage: &mut Stage, text: &str) -> Result<(u32, u32), String> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let passwd = accounts(stage, "/etc/passwd")?;
    let by_name = passwd.iter().find(|line| line.first().is_some_and(|name| name == user));
    let field = |line: &[String], at: usize| line.get(at).and_then(|field| field.parse::<u32>().ok());
    let (uid, own) = match (by_name, user.parse::<u32>()) {
        (Some(line), _) => {
            let uid = field(line, 2).ok_or_else(|| format!("/etc/passwd has no number for {user:?}"))?;
            (uid, field(line, 3))
        }
        (None, Ok(uid)) => {
            let line = passwd.iter().find(|line| field(line, 2) == Some(uid));
            (uid, line.and_then(|line| field(line, 3)))
        }
        (None, Err(_)) => return Err(format!("its user {user:?} is not in its /etc/passwd")),
    };
    let gid = match group {
        None => own.unwrap_or(uid),
        Some(group) => {
            let groups = accounts(stage, "/etc/group")?;
            let named = groups.iter().find(|line| line.first().is_some_and(|name| name == group));
            match (named.and_then(|line| field(line, 2)), group.parse::<u32>()) {
                (Some(gid), _) | (None, Ok(gid)) => gid,
                (None, Err(_)) => return Err(format!("its group {group:?} is not in its /etc/group")),
            }
        }
    };
    if uid == u32::MAX || gid == u32::MAX {
        return Err(format!("its user {text:?} has a number that stands for none"));
    }
    Ok((uid, gid))
}

/// Lines of an accounts file, split at the colons; none where there is no file.
pub(crate) fn accounts(stage: &mut Stage, path: &str) -> Result<Vec<Vec<String>>, String> {
    let Some((_, entry)) = stage.find(path) else { return Ok(Vec::new()) };
    let Node::File(content) = &entry.node else { return Err(format!("its {path} is no file")) };
    if content.len().map_err(|error| error.to_string())? > MAX_ACCOUNTS {
        return Err(format!("its {path} has more than {MAX_ACCOUNTS} bytes"));
    }
    let bytes = content.read(MAX_ACCOUNTS).map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().map(|line| line.split(':').map(str::to_owned).collect()).collect())
}
