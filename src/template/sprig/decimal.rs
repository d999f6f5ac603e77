//! Exact decimal arithmetic: `addf 0.1 0.2` is 0.3.

use num_bigint::{BigInt, Sign};

use super::{
    super::{
        limits::Failure,
        number::{FloatType, Notation, format_float},
        types::Type,
        value::{Context, Function, Value},
    },
    convert::to_float,
};

/// The digits of a quotient behind the point.
const PRECISION: i64 = 16;

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Float64};
    let fold = |name: &str, operation: Operation| {
        Function::variadic(name, &[Any, Any], Float64, move |context, arguments| {
            calculate(context, arguments[0], &arguments[1..], operation)
        })
    };
    vec![
        Function::new("add1f", &[Any], Float64, |context, arguments| {
            calculate(context, arguments[0], &[&Value::int(1)], add)
        }),
        Function::variadic("addf", &[Any], Float64, |context, arguments| {
            calculate(context, &Value::Float(0.0), arguments, add)
        }),
        fold("subf", |left, right| {
            let negated = Decimal {
                digits: -right.digits,
                exponent: right.exponent,
            };
            add(left, negated)
        }),
        fold("mulf", |left, right| {
            Ok(Decimal {
                digits: left.digits * right.digits,
                exponent: left.exponent + right.exponent,
            })
        }),
        fold("divf", divide),
    ]
}

type Operation = fn(Decimal, Decimal) -> Result<Decimal, Failure>;

/// `digits · 10^exponent`.
struct Decimal {
    digits: BigInt,
    exponent: i64,
}

fn calculate(
    context: &mut Context<'_>,
    first: &Value,
    rest: &[&Value],
    operation: Operation,
) -> Result<Value, Failure> {
    let mut result = Decimal::of(to_float(first))?;
    for value in rest {
        // Digits accumulate, so that each operation takes longer than the one before.
        let words = usize::try_from(result.digits.bits() / 64).unwrap_or(usize::MAX);
        context.step(words.saturating_add(1))?;
        context.allocate(words.saturating_mul(8).saturating_add(64))?;
        result = operation(result, Decimal::of(to_float(value))?)?;
    }
    let words = usize::try_from(result.digits.bits() / 64).unwrap_or(usize::MAX);
    context.step(words.saturating_mul(words) / 16)?;
    let text = format!("{}e{}", result.digits, result.exponent);
    Ok(Value::Float(text.parse().unwrap_or(0.0)))
}

impl Decimal {
    fn of(number: f64) -> Result<Self, Failure> {
        if !number.is_finite() {
            let shown = format_float(number, Notation::General, None, FloatType::Float64);
            return Err(Failure::Message(format!("Cannot create a Decimal from {shown}")));
        }
        let text = format!("{number:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let fraction = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len());
        let digits: String = mantissa.chars().filter(|character| *character != '.').collect();
        Ok(Self {
            digits: digits.parse().unwrap_or_default(),
            exponent: exponent.parse::<i64>().unwrap_or_default() - fraction as i64,
        })
    }
}

/// Returns a power of ten; exponents of `float64` are small.
fn power(exponent: i64) -> BigInt {
    BigInt::from(10).pow(u32::try_from(exponent).unwrap_or(0))
}

fn add(left: Decimal, right: Decimal) -> Result<Decimal, Failure> {
    let exponent = left.exponent.min(right.exponent);
    Ok(Decimal {
        digits: left.digits * power(left.exponent - exponent) + right.digits * power(right.exponent - exponent),
        exponent,
    })
}

fn divide(left: Decimal, right: Decimal) -> Result<Decimal, Failure> {
    if right.digits.sign() == Sign::NoSign {
        return Err(Failure::message("decimal division by 0"));
    }
    let shift = left.exponent - right.exponent + PRECISION;
    let numerator = left.digits * power(shift.max(0));
    let denominator = right.digits * power((-shift).max(0));
    let quotient = &numerator / &denominator;
    let rest = &numerator - &quotient * &denominator;
    let rounds = rest.magnitude() * 2_u32 >= *denominator.magnitude();
    let is_negative = (numerator.sign() == Sign::Minus) != (denominator.sign() == Sign::Minus);
    let unit = match (rounds, is_negative) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => -1,
    };
    Ok(Decimal {
        digits: quotient + unit,
        exponent: -PRECISION,
    })
}
