//! `docker://` against a registry that lies: nothing that it says is believed.

use crate::fixture::{Ground, Layer, gzip, hex};
use hotcell_image::{Limits, Recipe, Source};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

/// What the registry does to the one layer that it serves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    /// Other bytes than its digest names.
    Digest,
    /// The connection ends before the layer does.
    Truncated,
    /// The manifest says more bytes than there are.
    TooLarge,
    /// The manifest says fewer.
    TooSmall,
    /// Bytes without an end.
    Endless,
    /// Another manifest than the digest that is asked for.
    Manifest,
}

struct Served {
    lie: Lie,
    layer: Vec<u8>,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

impl Served {
    fn new(lie: Lie) -> Served {
        let plain = Layer::default().file("etc/a", &"honest".repeat(5000)).end();
        let layer = gzip(&plain);
        let config = format!(
            r#"{{"os":"linux","architecture":"amd64","config":{{}},"rootfs":{{"type":"layers","diff_ids":["sha256:{}"]}}}}"#,
            hex(&plain)
        )
        .into_bytes();
        let size = match lie {
            Lie::TooLarge => layer.len() + 100,
            Lie::TooSmall => layer.len() - 100,
            _ => layer.len(),
        };
        let kinds = "application/vnd.oci.image";
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":"{kinds}.manifest.v1+json","config":{{"mediaType":"{kinds}.config.v1+json","digest":"sha256:{}","size":{}}},"layers":[{{"mediaType":"{kinds}.layer.v1.tar+gzip","digest":"sha256:{}","size":{size}}}]}}"#,
            hex(&config),
            config.len(),
            hex(&layer)
        )
        .into_bytes();
        Served { lie, layer, config, manifest }
    }

    /// Serves until the test's process ends; the port.
    fn listen(self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = Arc::new(self);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = Arc::clone(&served);
                std::thread::spawn(move || served.answer(stream));
            }
        });
        port
    }

    /// One request, one answer, or as much of it as the client takes.
    fn answer(&self, mut stream: TcpStream) -> Option<()> {
        let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
        let request = lines.next()?.ok()?;
        lines.map_while(Result::ok).take_while(|line| !line.is_empty()).for_each(drop);
        let mut words = request.split(' ');
        let (method, path) = (words.next()?, words.next()?);
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let (status, kind, body) = match path {
            "/v2/" => ("200 OK", "application/json", b"{}".to_vec()),
            _ if path.contains("/manifests/") => ("200 OK", kind, self.manifest.clone()),
            _ if path.ends_with(&hex(&self.config)) => ("200 OK", "application/json", self.config.clone()),
            _ if path.ends_with(&hex(&self.layer)) => {
                ("200 OK", "application/octet-stream", self.layer.clone())
            }
            _ => ("404 Not Found", "application/json", b"{}".to_vec()),
        };
        let is_layer = body == self.layer;
        let endless = is_layer && self.lie == Lie::Endless;
        let mut head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n");
        if !endless {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        stream.write_all((head + "\r\n").as_bytes()).ok()?;
        let mut body = body;
        match self.lie {
            _ if method == "HEAD" => body.clear(),
            Lie::Digest if is_layer => {
                let last = body.len() - 9;
                body[last] ^= 1;
            }
            Lie::Truncated if is_layer => body.truncate(body.len() / 2),
            _ => {}
        }
        stream.write_all(&body).ok()?;
        if endless && method != "HEAD" {
            loop {
                stream.write_all(&[0; 1 << 16]).ok()?;
            }
        }
        Some(())
    }
}

#[test]
fn a_registry_that_lies_gives_no_image() {
    if Command::new("skopeo").arg("--version").output().is_err() {
        eprintln!("NOT RUN: skopeo is not installed");
        return;
    }
    for lie in
        [Lie::None, Lie::Digest, Lie::Truncated, Lie::TooLarge, Lie::TooSmall, Lie::Endless, Lie::Manifest]
    {
        let ground = Ground::new();
        let served = Served::new(lie);
        let pin = match lie {
            Lie::Manifest => format!("@sha256:{}", hex(&served.config)),
            _ => ":1".into(),
        };
        let reference = format!("docker://127.0.0.1:{}/team/tool{pin}", served.listen());
        let recipe = Recipe::new(Source::parse(&reference, ground.path()).unwrap());
        let built = ground.build("lied", &recipe, Limits::default());
        assert_eq!(built.is_ok(), lie == Lie::None, "{lie:?}: {built:?}");
        assert_eq!(ground.path().join("images/lied").exists(), lie == Lie::None, "{lie:?}");
        if let Err(error) = built {
            println!("{lie:?}: {error}");
        }
    }
}
