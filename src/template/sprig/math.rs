//! Numbers: integer arithmetic wraps, as in Go.

use super::{
    super::{
        format,
        limits::Failure,
        types::Type,
        value::{Context, Function, List, Value},
    },
    convert::{to_float, to_int},
    int,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Float64, String};
    let pair = |name: &str, operation: fn(i64, i64) -> Result<i64, Failure>| {
        Function::new(name, &[Any, Any], Type::INT64, move |_, arguments| {
            operation(to_int(arguments[0]), to_int(arguments[1])).map(Value::int64)
        })
    };
    let fold = |name: &str, operation: fn(i64, i64) -> i64| {
        Function::variadic(name, &[Any, Any], Type::INT64, move |_, arguments| {
            let rest = arguments[1..].iter().copied().map(to_int);
            Ok(Value::int64(rest.fold(to_int(arguments[0]), operation)))
        })
    };
    let fold_float = |name: &str, operation: fn(f64, f64) -> f64| {
        Function::variadic(name, &[Any, Any], Float64, move |_, arguments| {
            let rest = arguments[1..].iter().copied().map(to_float);
            Ok(rest.fold(to_float(arguments[0]), operation).into())
        })
    };
    let float = |name: &str, operation: fn(f64) -> f64| {
        Function::new(name, &[Any], Float64, move |_, arguments| {
            Ok(operation(to_float(arguments[0])).into())
        })
    };
    vec![
        Function::new("add1", &[Any], Type::INT64, |_, arguments| {
            Ok(Value::int64(to_int(arguments[0]).wrapping_add(1)))
        }),
        Function::variadic("add", &[Any], Type::INT64, |_, arguments| {
            Ok(Value::int64(
                arguments.iter().copied().map(to_int).fold(0, i64::wrapping_add),
            ))
        }),
        pair("sub", |left, right| Ok(left.wrapping_sub(right))),
        pair("div", |left, right| match right {
            0 => Err(division_by_zero()),
            right => Ok(left.wrapping_div(right)),
        }),
        pair("mod", |left, right| match right {
            0 => Err(division_by_zero()),
            right => Ok(left.wrapping_rem(right)),
        }),
        fold("mul", i64::wrapping_mul),
        fold("max", Ord::max),
        fold("min", Ord::min),
        fold_float("maxf", |left, right| {
            if left.is_nan() || right.is_nan() {
                f64::NAN
            } else {
                left.max(right)
            }
        }),
        fold_float("minf", |left, right| {
            if left.is_nan() || right.is_nan() {
                f64::NAN
            } else {
                left.min(right)
            }
        }),
        float("ceil", f64::ceil),
        float("floor", f64::floor),
        Function::variadic("round", &[Any, Type::INT, Float64], Float64, |_, arguments| {
            let threshold = match arguments.get(2) {
                Some(Value::Float(threshold)) => *threshold,
                _ => 0.5,
            };
            let power = 10.0_f64.powf(int(arguments, 1) as f64);
            let shifted = power * to_float(arguments[0]);
            // The fraction of a negative number is negative, so it is always rounded down.
            let rounded = if shifted.fract() >= threshold {
                shifted.ceil()
            } else {
                shifted.floor()
            };
            Ok((rounded / power).into())
        }),
        Function::new("toDecimal", &[Any], Type::INT64, |context, arguments| {
            let shown = format::display(context, arguments[0])?;
            let text = std::string::String::from_utf8_lossy(&shown);
            Ok(Value::int64(i64::from_str_radix(&text, 8).unwrap_or(0)))
        }),
        Function::new("until", &[Type::INT], Type::INT.list(), |context, arguments| {
            let count = int(arguments, 0);
            numbers(context, 0, count, if count < 0 { -1 } else { 1 })
        }),
        Function::new(
            "untilStep",
            &[Type::INT, Type::INT, Type::INT],
            Type::INT.list(),
            |context, arguments| numbers(context, int(arguments, 0), int(arguments, 1), int(arguments, 2)),
        ),
        Function::variadic("seq", &[Type::INT], String, seq),
    ]
}

fn division_by_zero() -> Failure {
    Failure::message("runtime error: integer divide by zero")
}

/// Returns the integers from a start to a stop, without it.
fn numbers(context: &mut Context<'_>, start: i64, stop: i64, step: i64) -> Result<Value, Failure> {
    let distance = i128::from(stop) - i128::from(start);
    let count = match i128::from(step) {
        0 => 0,
        step => (distance + step - step.signum()) / step,
    };
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    context.allocate_elements(count)?;
    let number = |index: usize| Value::int(start.wrapping_add(step.wrapping_mul(index as i64)));
    Ok(List::of(Type::INT, (0..count).map(number).collect()).into())
}

/// Returns integers as a text. With two or three arguments, the last one is included.
fn seq(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let (start, step, end) = match arguments {
        [_] => {
            let end = int(arguments, 0);
            (1, if end < 1 { -1 } else { 1 }, end)
        }
        [_, _] => {
            let (start, end) = (int(arguments, 0), int(arguments, 1));
            (start, if end < start { -1 } else { 1 }, end)
        }
        [_, _, _] => (int(arguments, 0), int(arguments, 1), int(arguments, 2)),
        _ => return Ok("".into()),
    };
    if end < start && step > 0 {
        return Ok("".into());
    }
    let beyond = end.wrapping_add(if end < start { -1 } else { 1 });
    let Value::List(list) = numbers(context, start, beyond, step)? else {
        return Ok("".into());
    };
    context.allocate(list.items().len().saturating_mul(20))?;
    let texts: Vec<std::string::String> = list.items().iter().map(|number| to_int(number).to_string()).collect();
    Ok(texts.join(" ").into())
}
