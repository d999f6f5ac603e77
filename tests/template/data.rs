//! The data of all cases, equal to that of `data.go`: typed values as a caller of the module would pass them.

use std::sync::Arc;

use istiod::template::{Failure, Function, IntType, List, Map, Object, Type, UintType, Value};

#[derive(Clone, PartialEq)]
struct Pod {
    name: String,
    labels: Vec<(&'static str, &'static str)>,
    containers: Vec<Container>,
    replicas: Option<i32>,
    owner: Option<Arc<Pod>>,
}

#[derive(Clone, PartialEq)]
struct Container {
    name: &'static str,
    port: i32,
}

/// A `Pod` or a pointer to one, which may be nil.
enum PodValue {
    Struct(Arc<Pod>),
    Pointer(Option<Arc<Pod>>),
}

impl PodValue {
    fn pod(&self) -> Option<&Arc<Pod>> {
        match self {
            Self::Struct(pod) => Some(pod),
            Self::Pointer(pod) => pod.as_ref(),
        }
    }
}

fn pointer(pod: Option<Arc<Pod>>) -> Value {
    Value::object(PodValue::Pointer(pod))
}

impl Object for PodValue {
    fn type_of(&self) -> Type {
        match self {
            Self::Struct(_) => Type::named("main.Pod"),
            Self::Pointer(_) => Type::named("main.Pod").pointer(),
        }
    }

    fn is_nil(&self) -> bool {
        self.pod().is_none()
    }

    fn field_names(&self) -> Vec<&str> {
        vec!["Name", "Labels", "Spec", "Owner"]
    }

    fn field(&self, name: &str) -> Option<Value> {
        let Some(pod) = self.pod() else {
            return self.field_names().contains(&name).then_some(Value::Nil);
        };
        Some(match name {
            "Name" => pod.name.as_str().into(),
            "Labels" if pod.labels.is_empty() => Map::nil(Type::String).into(),
            "Labels" => Map::of_strings(pod.labels.iter().copied()).into(),
            "Spec" => Value::object(Spec(pod.clone())),
            "Owner" => pointer(pod.owner.clone()),
            _ => return None,
        })
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let pod = self.pod().cloned();
        // A value in an interface has no address, so it has no methods of the pointer.
        if matches!(self, Self::Struct(_)) {
            return None;
        }
        let own_name = pod.as_ref().map_or("nobody".to_owned(), |pod| pod.name.clone());
        Some(Arc::new(match name {
            "GetName" => Function::getter(name, own_name.into()),
            "GetOwner" => Function::getter(name, pointer(pod.and_then(|pod| pod.owner.clone()))),
            "Join" => Function::variadic(
                name,
                &[Type::String, Type::String],
                Type::String,
                move |_, arguments| {
                    let texts: Vec<String> = arguments.iter().copied().map(text).collect();
                    let mut out = own_name.clone();
                    for part in &texts[1..] {
                        out = out + &texts[0] + part;
                    }
                    Ok(out.into())
                },
            ),
            "Fail" => Function::new(name, &[Type::String], Type::String, |_, arguments| {
                Err(Failure::message(format!("cannot: {}", text(arguments[0]))))
            }),
            _ => return None,
        }))
    }

    fn address(&self) -> Option<usize> {
        self.pod().map(|pod| Arc::as_ptr(pod).addr())
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_str().into_owned(),
        _ => String::new(),
    }
}

/// The `Spec` of a pod.
struct Spec(Arc<Pod>);

impl Object for Spec {
    fn type_of(&self) -> Type {
        Type::named("main.Spec")
    }

    fn field_names(&self) -> Vec<&str> {
        vec!["Containers", "Replicas", "Host"]
    }

    fn field(&self, name: &str) -> Option<Value> {
        Some(match name {
            "Containers" => {
                let containers = self.0.containers.iter().cloned().map(Value::object);
                List::of(Type::named("main.Container"), containers.collect()).into()
            }
            "Replicas" => int32_pointer(self.0.replicas),
            "Host" => Value::Bool(false),
            _ => return None,
        })
    }
}

impl Object for Container {
    fn type_of(&self) -> Type {
        Type::named("main.Container")
    }

    fn field_names(&self) -> Vec<&str> {
        vec!["Name", "Port"]
    }

    fn field(&self, name: &str) -> Option<Value> {
        Some(match name {
            "Name" => self.name.into(),
            "Port" => Value::Int(IntType::Int32, self.port.into()),
            _ => return None,
        })
    }
}

/// An enum with names.
struct Mode(i64);

impl Mode {
    fn name(&self) -> String {
        if self.0 == 1 {
            "TPROXY".to_owned()
        } else {
            format!("MODE_{}", self.0)
        }
    }
}

impl Object for Mode {
    fn type_of(&self) -> Type {
        Type::named("main.Mode")
    }

    fn basic(&self) -> Option<Value> {
        Some(Value::Int(IntType::Int32, self.0))
    }

    fn to_text(&self) -> Option<String> {
        Some(self.name())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        (name == "String").then(|| Arc::new(Function::getter(name, self.name().into())))
    }
}

/// A named string.
struct Protocol(&'static str);

impl Object for Protocol {
    fn type_of(&self) -> Type {
        Type::named("main.Protocol")
    }

    fn basic(&self) -> Option<Value> {
        Some(self.0.into())
    }
}

fn int32_pointer(number: Option<i32>) -> Value {
    match number {
        Some(number) => Value::Pointer(Arc::new(Value::Int(IntType::Int32, number.into()))),
        None => Value::NilPointer(Type::Int(IntType::Int32)),
    }
}

fn function(function: Function) -> Value {
    Value::Function(Arc::new(function))
}

/// Returns the data.
pub(super) fn data() -> Value {
    let pod = Arc::new(Pod {
        name: "web-0".to_owned(),
        labels: vec![("app", "web"), ("version", "v1")],
        containers: vec![
            Container {
                name: "app",
                port: 8080,
            },
            Container {
                name: "istio-proxy",
                port: 15090,
            },
        ],
        replicas: Some(3),
        owner: None,
    });
    let owned = Arc::new(Pod {
        name: "child".to_owned(),
        labels: Vec::new(),
        containers: Vec::new(),
        replicas: None,
        owner: Some(pod.clone()),
    });
    let mut entries = plain();
    entries.extend(collections());
    entries.extend([
        ("pod", pointer(Some(pod.clone()))),
        ("owned", pointer(Some(owned))),
        ("podValue", Value::object(PodValue::Struct(pod))),
        ("nilPod", pointer(None)),
        ("mode", Value::object(Mode(1))),
        ("protocol", Value::object(Protocol("TCP"))),
        ("truePtr", Value::Pointer(Arc::new(Value::Bool(true)))),
        ("falsePtr", Value::Pointer(Arc::new(Value::Bool(false)))),
        ("replicas", int32_pointer(Some(3))),
        ("nilInt", int32_pointer(None)),
        (
            "join",
            function(Function::new(
                "join",
                &[Type::INT, Type::String],
                Type::String,
                |_, arguments| {
                    let Value::Int(_, count) = arguments[0] else {
                        return Ok(Value::Nil);
                    };
                    Ok(format!("{}{count}", text(arguments[1])).into())
                },
            )),
        ),
        (
            "sum",
            function(Function::variadic("sum", &[Type::INT], Type::INT, |_, arguments| {
                let number = |value: &Value| match value {
                    Value::Int(_, number) => *number,
                    _ => 0,
                };
                Ok(Value::int(arguments.iter().copied().map(number).sum()))
            })),
        ),
        (
            "failing",
            function(Function::new("failing", &[], Type::String, |_, _| {
                Err(Failure::message("it failed"))
            })),
        ),
    ]);
    Value::map(entries)
}

/// Strings, numbers and booleans.
fn plain() -> Vec<(&'static str, Value)> {
    vec![
        ("name", "World".into()),
        ("empty", "".into()),
        ("text", "héllo wörld".into()),
        ("lines", "a\nb\n  c".into()),
        ("padded", "  a b ".into()),
        ("quoted", r#"<a href="x">'&'</a>"#.into()),
        ("number", "12".into()),
        ("decimal", "1.50".into()),
        ("word", "abc".into()),
        ("int", Value::int(5)),
        ("neg", Value::int(-7)),
        ("zero", Value::int(0)),
        ("int64", Value::int64(64)),
        ("int32", Value::Int(IntType::Int32, 32)),
        ("int8", Value::Int(IntType::Int8, -8)),
        ("uint", Value::Uint(UintType::Uint, 9)),
        ("uint8", Value::Uint(UintType::Uint8, 200)),
        ("uint64", Value::Uint(UintType::Uint64, u64::MAX)),
        ("float", Value::Float(3.25)),
        ("whole", Value::Float(2.0)),
        ("big", Value::Float(1e21)),
        ("million", Value::Float(1_234_567.0)),
        ("small", Value::Float(1e-7)),
        ("float32", Value::Float32(0.1)),
        ("yes", true.into()),
        ("no", false.into()),
        ("nil", Value::Nil),
    ]
}

/// Lists and maps.
fn collections() -> Vec<(&'static str, Value)> {
    vec![
        (
            "list",
            Value::list(vec![
                Value::int(1),
                "two".into(),
                Value::Float(3.5),
                Value::Nil,
                true.into(),
            ]),
        ),
        ("strings", List::of_strings(["b", "a", "c"]).into()),
        ("ints", List::of(Type::INT, [3, 1, 2].map(Value::int).to_vec()).into()),
        ("none", Value::list(Vec::new())),
        ("nilList", List::nil(Type::String).into()),
        (
            "nested",
            Value::list(vec![
                Value::list(vec![Value::int(1), Value::int(2)]),
                Value::map([("k", "v".into())]),
                Value::list(Vec::new()),
            ]),
        ),
        (
            "map",
            Value::map([
                ("a", Value::int(1)),
                ("b", "x".into()),
                ("c", Value::map([("d", "deep".into())])),
                ("n", Value::Nil),
            ]),
        ),
        ("labels", Map::of_strings([("app", "web"), ("version", "v1")]).into()),
        (
            "counts",
            Map::of(
                Type::INT,
                [("x".into(), Value::int(1)), ("y".into(), Value::int(2))].into(),
            )
            .into(),
        ),
        ("emptyMap", Value::map::<&str>([])),
        ("nilMap", Map::nil(Type::String).into()),
    ]
}
