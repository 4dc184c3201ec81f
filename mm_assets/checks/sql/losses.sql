-- What was rejected or dropped does not exceed the limit: a number, or a share of it and the rows that were kept.
-- Holds without rows in: loss_limit.
select
    format(
        '{}: {} of {} items {} ({:.4g} %), at most {} allowed: `{}` lists them',
        setting, lost, kept + lost, replace(setting, 'max_', ''), 100.0 * lost / (kept + lost), allowed, command
    ) as problem
from (select count(*) as lost from own_losses where reason not in (from harmless_reasons))
cross join (select count(*) as kept from own_rows)
cross join loss_limit
where
    lost > most
    or lost::hugeint * 100_000_000 > (kept + lost)::hugeint * share  -- exact, as 29 % of 100 is 29
order by problem
