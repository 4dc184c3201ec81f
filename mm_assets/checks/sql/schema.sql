-- The tables have exactly the declared columns: names, order, types and which of them may be null.
-- Holds if equal: expected_columns, actual_columns.
select
    table_name,
    ordinal,
    e.column_name as expected_name,
    a.column_name as found_name,
    e.column_type as expected_type,
    a.column_type as found_type,
    e.nullable as expected_nullable,
    a.nullable as found_nullable
from expected_columns as e
full join actual_columns as a using (table_name, ordinal)
where
    e.column_name is distinct from a.column_name
    or e.column_type is distinct from a.column_type
    or e.nullable is distinct from a.nullable
order by table_name, ordinal
